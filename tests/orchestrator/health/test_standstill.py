"""A run that stands still is reported once and at its end; runs that learn are not."""

import json
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from random import Random
from typing import Any

import pytest

from leyden.config import TrainingConfig
from leyden.orchestrator.health.standstill import StandstillDetector

RESULTS = Path(__file__).parents[3] / "results"


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


def test_a_run_that_was_stopped_is_judged_by_where_its_pace_would_have_led() -> None:
    lines = [line(step, **({"training__kl_start": 1e-5} if step % 5 == 1 else {})) for step in range(1, 9)]
    moved = StandstillDetector.of(lines, TrainingConfig(steps=100))
    assert moved.verdict is None  # sqrt(1e-5 * 32 / 2) = 0.013 after 5 updates, so 0.25 after 100
    ended = StandstillDetector.of(lines, TrainingConfig(steps=8))
    assert ended.verdict is not None and "by 0.01 of its range" in ended.verdict
    still = StandstillDetector.of([one | {"training/kl_start": 0.0} for one in lines], TrainingConfig(steps=100))
    assert still.verdict is not None


def rewards(steps: int, expected: Callable[[int], float], seed: int = 7) -> list[dict[str, Any]]:
    rng = Random(seed)
    return [line(step, reward__mean=expected(step) + rng.gauss(0, 0.06)) for step in range(1, steps + 1)]


def judged(lines: list[dict[str, Any]], **training: int) -> str | None:
    return StandstillDetector.of(lines, TrainingConfig(steps=len(lines), **training)).verdict


def test_rewards_that_stay_within_their_noise_are_reported_after_the_last_step() -> None:
    lines = rewards(24, lambda step: 0.4)
    lines[9] |= {"held_out/change": 0.02, "held_out/change_error": 0.03}
    detector = StandstillDetector(TrainingConfig(steps=24))
    assert follow(detector, lines[:23]) == {} and detector.verdict is None
    assert follow(detector, lines[23:]) == {}
    assert detector.verdict is not None and "not moved beyond their noise in 24 steps" in detector.verdict
    assert "the held-out reward by +0.020 ± 0.030" in detector.verdict


def test_the_rise_of_a_line_and_its_error() -> None:
    values = [0.0, 0.2, 0.1] * 7
    said = judged([line(step, reward__mean=value) for step, value in enumerate(values, start=1)])
    steps, mean = range(1, 22), 0.1
    spread = sum((step - 11) ** 2 for step in steps)
    slope = sum((step - 11) * (value - mean) for step, value in zip(steps, values, strict=True)) / spread
    left = sum((value - mean - slope * (step - 11)) ** 2 for step, value in zip(steps, values, strict=True))
    assert said is not None and f"by {20 * slope:+.3f} ± {20 * sqrt(left / 19 / spread):.3f}" in said


def test_how_much_alike_neighbours_are() -> None:
    """Of +-1 in n steps the spread is n and each change of sign is a difference of 4."""
    turns = [1.0, 1.0, -1.0, -1.0] * 6  # 11 changes of sign: (1 - 44 / 48) sqrt(575 / 22) = 0.43
    assert judged([line(step, reward__mean=value) for step, value in enumerate(turns, start=1)]) is not None
    waves = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0] * 4  # 7 changes of sign: (1 - 28 / 48) sqrt(575 / 22) = 2.13
    assert judged([line(step, reward__mean=value) for step, value in enumerate(waves, start=1)]) is None
    assert judged([line(step, reward__mean=0.0) for step in range(1, 25)]) is not None


def test_steps_of_the_warm_up_show_where_the_rewards_began() -> None:
    lines = rewards(24, lambda step: 0.3 if step < 3 else 0.8)
    assert judged(lines, warmup_steps=3) is None
    assert judged(rewards(24, lambda step: 0.4), warmup_steps=5) is None  # 19 steps after it


LEARNING: dict[str, Callable[[int], float]] = {
    "rises": lambda step: 0.3 + 0.005 * step,
    "rises late": lambda step: 0.1 if step < 30 else 0.1 + 0.01 * (step - 30),
    "jumps early": lambda step: 0.3 if step < 3 else 0.8,
    "rises and falls": lambda step: 0.3 + 0.01 * min(step, 100 - step),
}


@pytest.mark.parametrize("expected", LEARNING.values(), ids=LEARNING)
def test_rewards_that_move_are_not_reported(expected: Callable[[int], float]) -> None:
    assert sum(judged(rewards(100, expected, seed)) is not None for seed in range(40)) <= 2


def test_most_runs_that_do_not_move_are_reported() -> None:
    assert sum(judged(rewards(100, lambda step: 0.4, seed)) is not None for seed in range(40)) >= 32


def test_rewards_are_not_reported_if_the_held_out_reward_moved() -> None:
    assert (
        judged([one | {"held_out/change": 0.2, "held_out/change_error": 0.03} for one in rewards(24, lambda step: 0.4)])
        is None
    )


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(RESULTS.rglob("*metrics.jsonl")) if not {"gpu_step", "spark"} & {*path.parts}],
    ids=lambda path: str(path.relative_to(RESULTS)),
)
def test_runs_that_learned_are_not_reported(path: Path) -> None:
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    detector = StandstillDetector(TrainingConfig(steps=lines[-1]["step"]))
    assert follow(detector, lines) == {} and detector.verdict is None
