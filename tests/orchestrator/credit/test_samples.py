"""Every rollout of a step is trained on, or left out for a reason that is counted."""

import math

import pytest
from msgspec.structs import replace
from smallepisodes import call, episode

from leyden.config import read_config
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.orchestrator.credit.samples import SampleFilter, StepAccounting, make_samples, select_rollouts
from leyden.outcomes import Ending
from leyden.records import Call, CallStatus, Sampling

RULES = SampleFilter(min_group=2, failure_reward=-1.0, roles=None)


def test_a_failure_of_the_agent_counts_and_one_of_the_machinery_does_not() -> None:
    accounting = StepAccounting()
    group = [
        episode(0, 1.0, [call("a")]),
        episode(1, None, [call("b")], Ending.AGENT_ERROR),
        episode(2, None, [call("c")], Ending.LOST),
        episode(3, None, [call("d")], Ending.NO_REWARD),
    ]
    scored = select_rollouts(group, RULES, accounting)
    assert scored is not None
    assert [one.final for one in scored] == [1.0, -1.0]
    assert accounting.excluded == {"lost": 1, "no_reward": 1}
    assert accounting.requested == accounting.trained + accounting.excluded.total()
    assert accounting.outcomes == {"succeeded": 1, "agent_error": 1, "lost": 1, "no_reward": 1}


def test_a_group_that_is_too_small_is_dropped_whole() -> None:
    accounting = StepAccounting()
    group = [episode(0, 1.0, [call("a")]), episode(1, None, [], Ending.LOST), episode(2, 1.0, [])]
    assert select_rollouts(group, replace(RULES, min_group=3), accounting) is None
    assert accounting.excluded == {"lost": 1, "no call to train on": 1, "group too small": 1}
    assert (accounting.trained, accounting.groups_dropped) == (0, 1)
    assert accounting.requested == accounting.excluded.total()


def test_calls_that_may_not_be_trained_on_are_counted_by_why() -> None:
    accounting = StepAccounting()
    rules = SampleFilter(1, 0.0, roles=("writer",))
    calls = [
        call("a", role="writer"),
        call("b", role="checker"),
        call("c", status=CallStatus.ABANDONED),
        Call(id="d", completion_ids=(1,), role="writer"),
        call("e", role="writer", policy="upstream"),
        call("f", role="writer", sampling=Sampling(top_p=0.9)),
    ]
    scored = select_rollouts([episode(0, 1.0, calls)], rules, accounting)
    assert scored is not None
    assert [(turn, one.call.id) for turn, one in scored[0].transitions] == [(0, "a")]
    why = ("role not selected", "abandoned", "no logprobs", "another policy", "truncated sampling")
    assert accounting.calls_excluded == dict.fromkeys(why, 1)


def test_a_greedy_call_is_trained_on_at_the_temperature_of_its_logprobs() -> None:
    """Engines report logprobs at temperature 1 for it; a division by its temperature of 0 would give NaN."""
    greedy = episode(0, 1.0, [call("a", sampling=Sampling(temperature=0.0))])
    scored = select_rollouts([greedy], SampleFilter(1, 0.0, None, allow_biased_sampling=True), StepAccounting())
    assert scored is not None
    assert [sample.temperature for sample in make_samples([scored])] == [1.0]


def test_calls_of_biased_sampling_are_trained_on_where_allowed() -> None:
    whole = episode(0, 1.0, [call("a", sampling=Sampling(top_p=0.9))])
    asked = algorithm_of(
        read_config({"run": "r", "agent": "a", "tasks": "t", "training": {"allow_biased_sampling": True}})
    )
    scored = select_rollouts([whole], replace(asked.sample_filter, min_group=1), StepAccounting())
    assert scored is not None
    assert [one.call.id for _, one in scored[0].transitions] == ["a"]


def test_a_token_that_goes_on_after_a_stop_string_is_context() -> None:
    accounting = StepAccounting()
    calls = [call("a", context_tail=1), call("b", tokens=1, context_tail=1)]
    scored = select_rollouts([episode(index, 1.0, calls) for index in range(2)], RULES, accounting)
    assert scored is not None
    sample = make_samples([scored])[0]
    assert (list(sample.token_indices), sample.sampler_logprobs) == ([0, 1], (-1.0, -1.0))
    assert len(sample.completion_ids) == 3
    assert accounting.calls_excluded == {"ended by a stop string within its only token": 2}


def test_only_what_the_model_chose_is_trained_on() -> None:
    accounting = StepAccounting()
    calls = [call("a"), call("b", allowed=(1.0, 0.2, 0.995)), call("c", allowed=(0.0,) * 3)]
    scored = select_rollouts([episode(index, 1.0, calls) for index in range(2)], RULES, accounting)
    assert scored is not None
    assert accounting.calls_excluded == {"chosen by a grammar": 2}
    samples = make_samples([scored])
    assert samples[1].sampler_logprobs == pytest.approx(
        (-1.0, -1.0 + math.log(0.995))
    )  # the model's own, not the grammar's
    assert [(sample.call, list(sample.token_indices), len(sample.sampler_logprobs)) for sample in samples[:2]] == [
        ("a", [0, 1, 2], 3),
        ("b", [0, 2], 2),
    ]


def test_an_answer_that_its_client_requested_again_is_context() -> None:
    accounting = StepAccounting()
    message = {"role": "user", "content": "hello"}
    said = {"role": "assistant", "content": "hi"}
    calls = [
        call("a", messages=(message,), response=said),
        call("a-1", choice=1, parent="a", kept_ids=2, kept_messages=1),
        call("b", messages=(message,), response=said, retry_of="a"),
        call("c", parent="b", kept_messages=2, messages=(message,)),
    ]
    scored = select_rollouts([episode(0, 1.0, calls)], replace(RULES, min_group=1), accounting)
    assert scored is not None
    assert [one.call.id for _, one in scored[0].transitions] == ["b", "c"]
    assert accounting.calls_excluded == {"requested again": 2}
    # the answer was used after all: another request with the same messages was repeated
    used = [*calls, call("d", parent="a", kept_messages=2, messages=(message,))]
    scored = select_rollouts([episode(0, 1.0, used)], replace(RULES, min_group=1), StepAccounting())
    assert scored is not None
    assert [one.call.id for _, one in scored[0].transitions] == ["a", "b", "c", "d"]
