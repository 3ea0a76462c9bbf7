"""The time of a step: its phases, and the shares of sampling."""

from leyden.orchestrator.report.time_summary import time_summary


def test_the_phases_add_up_to_the_step_and_the_shares_to_sampling() -> None:
    step = {"time/sampling_s": 6.0, "time/training_s": 3.0, "time/publishing_s": 0.5}
    split = {"time/sampling/decoding_s": 4.5, "time/sampling/agents_s": 1.5}
    lines = [{"step": 0, "held_out/reward": 0.5}, {**step, **split}, {**step, **split, "time/evaluation_s": 1.0}]
    assert time_summary(lines) == (
        "a step took 10.00 s: sampling 6.00 s (decoding 75%, agents 25%), training 3.00 s, publishing 0.50 s, "
        "evaluation 0.50 s"
    )


def test_a_run_without_a_step_has_no_summary() -> None:
    assert time_summary([{"step": 0, "held_out/reward": 0.5}]) == ""
