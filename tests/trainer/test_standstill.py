"""A run that stands still is reported once and at its end; runs that learn are not."""

import json
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any

import pytest

from leyden.config import TrainingConfig
from leyden.trainer.standstill import StandstillDetector

RESULTS = Path(__file__).parents[2] / "results"


def line(step: int, **metrics: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"step": step, "tokens/trained": 9.0, "length/rollout": 32.0, **named}


def follow(detector: StandstillDetector, lines: list[dict[str, Any]]) -> dict[int, str]:
    said = {one["step"]: detector.add_step(one["step"], one) for one in lines}
    return {step: message for step, message in said.items() if message is not None}


def test_a_policy_that_is_still_the_starting_model_is_reported_once_and_at_the_end() -> None:
    lines = [line(step, **({"training__kl_start": 1e-6} if step % 5 == 1 else {})) for step in range(1, 20)]
    detector = StandstillDetector(TrainingConfig(steps=19, learning_rate=1e-6))
    ((step, said),) = follow(detector, lines).items()
    assert step == 6  # sqrt(1e-6 * 32 / 2) = 0.004 after 5 updates, so 0.015 after 19
    assert "after 5 steps they differ by 1.0e-06 nats a token" in said
    assert "by 0.004 of its range at most" in said and "now 1e-06" in said and "when_it_does_not_learn.md" in said
    assert detector.verdict is not None and "after 15 steps" in detector.verdict
    assert StandstillDetector.of(lines, TrainingConfig(steps=19, learning_rate=1e-6)).verdict == detector.verdict


def test_a_slow_policy_that_will_have_moved_by_its_last_step_is_not_reported() -> None:
    lines = [line(1), *(line(step, training__kl_start=1e-6) for step in range(2, 7))]
    assert follow(StandstillDetector(TrainingConfig(steps=100)), lines) == {}  # 0.004 * 100 / 5 = 0.08
    assert list(follow(StandstillDetector(TrainingConfig(steps=50)), lines)) == [6]


def test_a_policy_that_has_moved_is_not_reported() -> None:
    lines = [line(step, training__kl_start=0.01) for step in range(1, 12)]  # sqrt(0.01 * 32 / 2) = 0.4
    detector = StandstillDetector(TrainingConfig(steps=11))
    assert follow(detector, lines) == {} and detector.verdict is None


def test_updates_of_the_warm_up_and_steps_without_one_do_not_count() -> None:
    lines = [line(step, training__kl_start=0.0) for step in range(1, 9)]
    assert follow(StandstillDetector(TrainingConfig(steps=8, warmup_steps=4)), lines) == {}
    idle = [one | {"tokens/trained": 0.0} for one in lines]
    assert follow(StandstillDetector(TrainingConfig(steps=8)), idle) == {}


def noise(steps: int, rise: float = 0.0) -> list[dict[str, Any]]:
    rng = Random(7)
    return [line(step, reward__mean=0.4 + rise * step / steps + rng.gauss(0, 0.05)) for step in range(1, steps + 1)]


def test_rewards_that_stay_within_their_noise_are_reported_after_20_steps() -> None:
    lines = noise(24)
    lines[9] |= {"held_out/change": 0.02, "held_out/change_error": 0.03}
    detector = StandstillDetector(TrainingConfig(steps=24))
    ((step, said),) = follow(detector, lines).items()
    assert step == 20 and "not moved beyond their noise in 20 steps" in said
    assert "the held-out reward by +0.020 ± 0.030" in said
    assert detector.verdict is not None and "in 24 steps" in detector.verdict


def test_the_rise_of_a_line_and_its_error() -> None:
    values = [0.0, 0.2, 0.1] * 7
    lines = [line(step, reward__mean=value) for step, value in enumerate(values, start=1)]
    said = StandstillDetector.of(lines, TrainingConfig(steps=21)).verdict
    steps, mean = range(1, 22), 0.1
    spread = sum((step - 11) ** 2 for step in steps)
    slope = sum((step - 11) * (value - mean) for step, value in zip(steps, values, strict=True)) / spread
    left = sum((value - mean - slope * (step - 11)) ** 2 for step, value in zip(steps, values, strict=True))
    assert said is not None and f"by {20 * slope:+.3f} ± {20 * sqrt(left / 19 / spread):.3f}" in said


def test_rewards_that_rise_or_a_held_out_reward_that_does_are_not_reported() -> None:
    assert follow(StandstillDetector(TrainingConfig(steps=24)), noise(24, rise=0.3)) == {}
    measured = [one | {"held_out/change": 0.2, "held_out/change_error": 0.03} for one in noise(24)]
    assert follow(StandstillDetector(TrainingConfig(steps=24)), measured) == {}


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RESULTS.rglob("*metrics.jsonl")) if not {"gpu_step", "spark"} & {*path.parts}],
    ids=lambda path: str(path.relative_to(RESULTS)),
)
def test_runs_that_learned_are_not_reported(path: Path) -> None:
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    detector = StandstillDetector(TrainingConfig(steps=lines[-1]["step"]))
    assert follow(detector, lines) == {} and detector.verdict is None
