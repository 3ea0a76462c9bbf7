"""Rollouts of a step are continued from inside, within a budget of tokens, and resumed runs do the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_training import ScriptedRun
from smallepisodes import call, episode

from leyden.api.wire import GroupSpec
from leyden.config import ConfigError, read_config
from leyden.episodes import Episode
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.orchestrator.credit.samples import SampleFilter, StepAccounting, select_rollouts
from leyden.orchestrator.rollouts.branching import Branching
from leyden.outcomes import Ending
from leyden.records import Call, CallStatus

TOKENS = 3


def script(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """Rollouts of four calls, every second of which succeeds."""
    calls = [
        call(f"{spec.id}.{index}.{number}", TOKENS) for number in range(4 - (spec.origin.calls if spec.origin else 0))
    ]
    return float(index % 2), calls, Ending.SUCCEEDED


def training(folder: Path, steps: int = 3, **algorithm: object) -> ScriptedRun:
    named = {"credit": "sampled", "continuations": 2, **algorithm}
    size = {"steps": steps, "tasks_per_step": 2, "group_size": 4}
    return ScriptedRun(folder, script, training=size, algorithm=named)


def continuations(run: ScriptedRun) -> dict[str, list[Episode]]:
    return {name: found for name, found in run.store.sampled.items() if found[0].rollout.origin is not None}


async def test_rollouts_are_continued_from_their_middle_and_what_that_adds_is_trained_on(tmp_path: Path) -> None:
    run = training(tmp_path, 1)
    await run.start()
    found = continuations(run)
    # 8 rollouts of 12 tokens give 48 tokens to continuations; 12 of them continue one rollout
    assert len(found) == 4 and all(name.endswith(".1-2") for name in found)
    assert {one.rollout.step for group in found.values() for one in group} <= {None, 1}
    (update,) = (entry for entry in run.journal if entry.startswith("accumulate"))
    trained = [word.split(":")[0] for word in update.split()[1:]]
    for name, group in found.items():
        assert all(f"{name}.{index}.0" in trained for index in (0, 1)), "what it adds"
        assert len([one for one in trained if one.startswith(name)]) == sum(len(one.calls) - 2 for one in group)
    report = run.observer.reports[0]
    assert (report.branches.sampled, report.branches.replayed) == (4 * 2 * 2 * TOKENS, 4 * 2 * 2 * TOKENS)
    assert report.sampled == (8 * 4 + 4 * 2 * 2) * TOKENS and len(report.rewards) == 8
    metrics = report.branches.metrics()
    assert (metrics["branches/groups"], metrics["branches/diverged"], metrics["branches/reward"]) == (4, 0, 0.5)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_continuations_go_before_the_rollouts_of_later_steps_that_run_beside_them(
    tmp_path: Path, max_staleness: int
) -> None:
    run = training(tmp_path, 2)
    run.with_settings(max_staleness=max_staleness)
    await run.start()
    asked = {(spec.origin is not None, spec.priority) for spec in run.store.requested}
    assert asked == {(False, 0), (True, 10 if max_staleness else 0)}


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("points", [1, 3])
async def test_a_step_that_takes_more_than_its_budget_leaves_less_to_the_next(
    tmp_path: Path, share: float, points: int
) -> None:
    run = training(tmp_path, 6, branch_tokens=share, branch_points=points)
    await run.start()
    largest = 2 * TOKENS * sum((3, 2, 1) if points == 3 else (2,))
    used = begun = 0.0
    for report in run.observer.reports:
        used += report.branches.sampled
        begun += report.sampled - report.branches.sampled
        assert used <= share * begun + largest + 1e-6  # one rollout more than the budget at the most, at any time
    assert used > share * begun - largest or used == 6 * 8 * largest


def test_whether_a_rollout_is_continued_does_not_depend_on_how_it_went_on() -> None:
    """Also not by the budget, which grows with all that the step has sampled."""
    named = {"credit": "sampled", "continuations": 2, "branch_tokens": 0.5}
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "algorithm": named})
    nobody: Any = None  # a plan requests nothing
    branching = Branching(config, algorithm_of(config), nobody, nobody, 0.0)

    def continued(last_tokens: Sequence[int]) -> list[bool]:
        episodes = [
            episode(index, float(index % 2), [call(f"{index}.{n}") for n in range(3)] + [call(f"{index}.3", last)])
            for index, last in enumerate(last_tokens)
        ]
        group = select_rollouts(episodes, SampleFilter(2, 0.0, None), StepAccounting())
        assert group is not None
        found = {one.origin.attempt for one in branching.plan([group], episodes, 1) if one.origin is not None}
        return [one.attempt.id in found for one in episodes]

    usual = continued([TOKENS] * 6)
    assert set(usual) == {False, True}
    for index in range(6):
        longer = [TOKENS] * 6
        longer[index] *= 100
        assert continued(longer)[index] == usual[index]


async def test_the_same_rollouts_are_continued_after_a_kill(tmp_path: Path) -> None:
    whole = training(tmp_path / "whole", branch_tokens=0.3)
    await whole.start()
    assert whole.checkpoints[3][0].branch_debt > 0
    for crash_at in range(3, len(whole.journal), 5):
        run = training(tmp_path / f"{crash_at}", branch_tokens=0.3)
        await run.kill(run.start(), crash_at)
        await run.start()
        assert run.learner.digest == whole.learner.digest and list(run.store.sampled) == list(whole.store.sampled)


async def test_continuations_that_left_the_record_say_nothing_of_a_value_and_are_counted(tmp_path: Path) -> None:
    run = training(tmp_path, 1, continuations=3)

    def diverging(found: Episode) -> Episode:
        leaves = found.rollout.origin is not None and found.rollout.index == 1
        return replace(found, calls=found.calls[1:]) if leaves else found

    run.store.recorded = diverging
    await run.start()
    report = run.observer.reports[0]
    groups = len(continuations(run))
    assert report.accounting.excluded == {"diverged": groups}
    assert report.branches.metrics()["branches/diverged"] == pytest.approx(1 / 3)
    # the others failed, so every second rollout that was continued did better than what is known of its middle
    assert report.branches.rewards == [0.0] * 2 * groups
    update = next(entry for entry in run.journal if entry.startswith("accumulate"))
    assert all(f"{name}.1." not in update for name in continuations(run))


async def test_no_rollout_is_continued_between_answers_to_one_request_or_after_a_call_that_failed(
    tmp_path: Path,
) -> None:
    def choices_and_failures(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        reward, (first, second, third, *rest), ending = script(replace(spec, origin=None), index)
        calls = [first, second, replace(third, choice=1, parent=second.id), *rest]
        if index % 2:
            calls = [first, second, replace(third, status=CallStatus.FAILED), *rest]
        return reward, calls[spec.origin.calls if spec.origin else 0 :], ending

    run = training(tmp_path, 1, branch_points=3, branch_tokens=10.0)
    run.store.script = choices_and_failures
    await run.start()
    found = {name.partition(".")[2] for name in continuations(run)}
    assert found == {f"{index}.1-{calls}" for index in range(4) for calls in ((1, 2) if index % 2 else (1, 3))}


def test_settings_that_change_returns_are_refused() -> None:
    for key, value in (("kl_in", "reward"), ("scale_steps", True)):
        with pytest.raises(ConfigError, match=r"set `algorithm.scale_steps = false` and `algorithm.kl_in"):
            read_config({"run": "r", "agent": "a", "tasks": "t", "algorithm": {"credit": "sampled", key: value}})


def test_several_policies_are_refused() -> None:
    policies = {"one": {"roles": ["writer"]}, "other": {}}
    document = {"run": "r", "agent": "a", "tasks": "t", "algorithm": {"credit": "sampled"}, "policies": policies}
    with pytest.raises(ConfigError, match="continues the rollouts of one policy"):
        read_config(document)
    policies["other"]["trained"] = False
    read_config(document)
