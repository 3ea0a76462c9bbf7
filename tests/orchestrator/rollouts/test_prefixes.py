"""Hard tasks are continued from inside their best rollouts, and only what is new is trained on."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from scripted_training import ScriptedRun
from smallepisodes import call, episode

from leyden.api.wire import GroupSpec
from leyden.learner.protocol import OpenGroup, PrefixRecord
from leyden.orchestrator.credit.samples import SampleFilter
from leyden.orchestrator.rollouts.prefixes import Prefixes
from leyden.orchestrator.rollouts.requested_group import RequestedGroup
from leyden.outcomes import Ending
from leyden.records import Call, CallStatus, Origin, Reward, RewardKind, Task

NOTHING = PrefixRecord()
EVERY_ROLE = SampleFilter(2, 0.0, None)


def group(rewards: Sequence[float], position: int = 0, open: OpenGroup | None = None, calls: int = 8) -> RequestedGroup:
    open = open or OpenGroup(position, 0, 1)
    spec = GroupSpec(f"train-{open.position}", Task(f"t{open.position}", {}), len(rewards), origin=open.origin)
    replayed = open.origin.calls if open.origin is not None else 0
    made = [call(f"c{n}", origin="earlier.0.1" if n < replayed else None) for n in range(calls)]
    found = [episode(index, reward, made) for index, reward in enumerate(rewards)]
    return RequestedGroup(open, spec, [replace(one, rollout=replace(one.rollout, origin=open.origin)) for one in found])


def after(*groups: RequestedGroup, prefixes: Prefixes | None = None, step: int = 1) -> tuple[Prefixes, list[OpenGroup]]:
    """The groups that can be requested after a step."""
    prefixes = prefixes or Prefixes(1.0, 0.0, [EVERY_ROLE], NOTHING)
    prefixes.add_step(groups, step)
    return prefixes, list(prefixes.record.waiting)


def test_a_hard_task_is_continued_from_the_middle_of_its_best_rollout() -> None:
    _, waiting = after(group([0.0, 0.0, 1.0, 0.0]))
    assert waiting == [OpenGroup(0, 0, 1, None, "t0", Origin("g.2.1", 4))]


@pytest.mark.parametrize("rewards", [[0.0] * 4, [1.0] * 4, [1.0, 0.0, 0.0]])
def test_others_are_not(rewards: list[float]) -> None:
    """Nothing is known to be better than another rollout, or more than a quarter of them succeed."""
    assert after(group(rewards))[1] == []


def test_a_task_that_fails_now_is_continued_from_the_rollout_that_once_succeeded_unless_that_is_long_ago() -> None:
    prefixes, _ = after(group([0.0, 1.0, 1.0, 0.0]))
    assert after(group([0.0] * 4), prefixes=prefixes, step=33)[1][0].origin == Origin("g.1.1", 4)
    assert after(group([0.0] * 4), prefixes=prefixes, step=34)[1] == []


def test_step_rewards_tell_which_of_equal_rollouts_was_best() -> None:
    hard = group([0.0] * 3)
    earned = Reward("s", 0.5, RewardKind.STEP, call="c0")
    assert hard.episodes is not None
    hard.episodes = [hard.episodes[0], replace(hard.episodes[1], rewards=(*hard.episodes[1].rewards, earned))]
    assert after(hard)[1][0].origin == Origin("g.1.1", 4)


def test_a_task_is_continued_from_its_newest_best_rollout_until_nothing_is_replayed() -> None:
    prefixes, (first,) = after(group([0.0, 0.0, 0.0, 1.0]))
    prefixes, (second,) = after(group([0.0] * 4, open=first), prefixes=prefixes)
    assert second.origin == Origin("g.3.1", 6)
    prefixes, (third,) = after(group([0.0, 1.0, 0.0, 1.0], open=second), prefixes=prefixes)
    assert third.origin == Origin("g.1.1", 6)  # a newer rollout that is as good
    prefixes, (fourth,) = after(group([1.0] * 4, open=third), prefixes=prefixes)
    assert fourth.origin == Origin("g.0.1", 4)
    assert after(group([1.0] * 4, open=fourth), prefixes=prefixes)[1] == []


def test_a_task_that_waits_until_its_best_rollout_is_old_is_left_to_its_order() -> None:
    prefixes, _ = after(group([0.0, 1.0, 0.0, 0.0]))
    assert len(after(prefixes=prefixes, step=33)[1]) == 1
    assert after(prefixes=prefixes, step=34)[1] == []


@pytest.mark.parametrize(
    ("succeeded", "replayed"), [(0, 12), (1, 12), (2, 12), (3, 10), (4, 8), (5, 4), (6, None), (8, None)]
)
def test_the_prefix_becomes_such_that_half_of_the_continuations_succeed_if_calls_fail_alike(
    succeeded: int, replayed: int | None
) -> None:
    prefixes, (first,) = after(group([0.0, 0.0, 1.0, 0.0], calls=16))
    continued = group([1.0] * succeeded + [0.0] * (8 - succeeded), open=first, calls=16)
    _, waiting = after(continued, prefixes=prefixes)
    assert [open.origin and open.origin.calls for open in waiting] == ([replayed] if replayed is not None else [])


def test_other_tasks_begin_with_the_share_that_was_needed_lately() -> None:
    prefixes, (first,) = after(group([0.0, 0.0, 1.0, 0.0], calls=100))
    prefixes, _ = after(group([0.0] * 4, open=first, calls=100), prefixes=prefixes)
    assert prefixes.record.share == 0.53125  # an eighth of the way from 0.5 to 0.75
    resumed = Prefixes(1.0, 0.0, [EVERY_ROLE], prefixes.record)
    *_, other = after(group([0.0, 1.0, 0.0, 0.0], 1, calls=100), prefixes=resumed)[1]
    assert other.task == "t1" and other.origin == Origin("g.1.1", 53)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_rollout_too_short_for_the_share_of_others_is_continued_from_its_middle(share: float) -> None:
    (short,) = after(
        group([0.0, 0.0, 1.0, 0.0], calls=2), prefixes=Prefixes(1.0, 0.0, [EVERY_ROLE], PrefixRecord(share=share))
    )[1]
    assert short.origin == Origin("g.2.1", 1)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_prefix_of_no_call_or_of_all_is_none_and_the_next_time_the_search_begins_anew(reward: float) -> None:
    prefixes, (first,) = after(group([0.0, 0.0, 1.0, 0.0], calls=2))
    assert after(group([reward] * 3, open=first, calls=2), prefixes=prefixes)[1] == []
    (again,) = after(group([0.0] * 3, calls=2), prefixes=prefixes)[1]
    assert again.origin is not None and again.origin.calls == 1


def test_rollouts_that_left_the_record_say_nothing_of_the_prefix() -> None:
    prefixes, (first,) = after(group([0.0, 0.0, 0.0, 1.0]))
    continued = group([0.0, 0.0, 1.0, 1.0], open=first)
    assert continued.episodes is not None
    left = [replace(one, calls=one.calls[1:]) for one in continued.episodes[2:]]
    continued.episodes = [*continued.episodes[:2], *left]
    assert after(continued, prefixes=prefixes)[1][0].origin == Origin("g.3.1", 6)


def test_calls_after_one_that_failed_are_in_no_prefix() -> None:
    """A rollout that begins with it would get another answer there."""
    hard = group([0.0, 0.0, 0.0, 1.0])
    assert hard.episodes is not None
    calls = hard.episodes[3].calls
    failed = replace(calls[2], status=CallStatus.FAILED)
    hard.episodes = [*hard.episodes[:3], replace(hard.episodes[3], calls=(*calls[:2], failed, *calls[3:]))]
    assert after(hard)[1][0].origin == Origin("g.3.1", 2)


@pytest.mark.parametrize(("last", "replayed"), [(7, 4), (3, 2), (0, None)])
def test_a_continuation_has_a_call_that_is_trained_on(last: int, replayed: int | None) -> None:
    """Checks follow the writer's last query, and are not trained on."""
    writers = SampleFilter(2, 0.0, ["writer"])
    hard = group([0.0, 0.0, 1.0, 0.0])
    calls = [call(f"c{number}", role="writer" if number <= last else "checker") for number in range(8)]
    hard.episodes = [replace(one, calls=tuple(calls)) for one in hard.episodes or ()]
    waiting = after(hard, prefixes=Prefixes(1.0, 0.0, [writers], NOTHING))[1]
    assert [open.origin and open.origin.calls for open in waiting] == ([replayed] if replayed is not None else [])


def test_seven_of_eight_groups_continue_tasks_which_take_turns() -> None:
    once = [1.0, 0.0, 0.0, 0.0, 0.0]
    prefixes, _ = after(*(group(once, position) for position in range(5)))
    taken = [prefixes.take(position) for position in (7, 8, 9, 15, 17, 24)]
    assert [one and one.task for one in taken] == ["t0", None, "t1", "t2", "t3", None]
    assert taken[2] == OpenGroup(1, 0, 1, None, "t1", Origin("g.0.1", 4)) and prefixes.record.continued == 4
    _, waiting = after(group(once, 1, taken[2]), prefixes=prefixes, step=2)
    assert [one.task for one in waiting] == ["t4", "t1"]


def test_what_is_known_outlives_a_restart() -> None:
    prefixes, _ = after(group([0.0, 0.0, 1.0, 0.0]), group([0.0, 0.0, 1.0, 0.0], 1))
    prefixes.take(1)
    record = msgspec.json.decode(msgspec.json.encode(prefixes.record), type=PrefixRecord)
    resumed = Prefixes(1.0, 0.0, [EVERY_ROLE], record)
    assert resumed.take(3) == prefixes.take(3) is not None and resumed.record == prefixes.record


def sparse(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """One of four rollouts of a task succeeds, and half of its continuations."""
    calls = [call(f"{spec.id}.{index}.{number}") for number in range(4 - (spec.origin.calls if spec.origin else 0))]
    return float(index % 2 if spec.origin else index == 3), calls, Ending.SUCCEEDED


def training(folder: Path) -> ScriptedRun:
    return ScriptedRun(folder, sparse, training={"steps": 5, "group_size": 4, "hard_tasks": "continue"})


async def test_a_run_trains_on_what_continuations_add_and_reports_what_they_replay(tmp_path: Path) -> None:
    run = training(tmp_path)
    await run.start()
    origins = {spec.id: spec.origin for spec in run.store.requested if spec.origin is not None}
    assert list(origins) == ["train-2", "train-3", "train-4", "train-5", "train-6", "train-7", "train-9"]
    assert {origin.calls for origin in origins.values()} == {2}
    begun = [spec.task.id for spec in run.store.requested if spec.origin is None]
    assert begun == [run.tasks.at(place).id for place in range(3)]  # no task is passed over
    step_1, step_2, *_ = (entry for entry in run.journal if entry.startswith("accumulate"))
    assert "train-0.3.0:+1.50" in step_1
    (first, *_) = origins
    assert f"{first}.1.0:+0.87 {first}.1.1:+0.87" in step_2 and "train-0.3.0" not in step_2
    metrics = run.observer.reports[1].branches
    tokens = 2 * 4 * 2 * 3  # of two groups, whose rollouts replay two calls and make two
    assert (metrics.replayed, metrics.sampled, metrics.rewards) == (tokens, tokens, [0.0, 1.0, 0.0, 1.0] * 2)
    assert run.observer.reports[1].sampled == tokens
    assert run.observer.reports[1].rewards == []  # of the rollouts that begin with their task
    assert run.observer.reports[4].rewards == [0.0, 0.0, 0.0, 1.0]
    assert run.observer.reports[1].accounting.calls_excluded == {"replayed": 16}


async def test_a_run_that_is_killed_anywhere_continues_the_same_tasks(tmp_path: Path) -> None:
    whole = training(tmp_path / "whole")
    await whole.start()
    for crash_at in range(4, len(whole.journal), 5):
        run = training(tmp_path / f"{crash_at}")
        await run.kill(run.start(), crash_at)
        await run.start()
        assert run.learner.digest == whole.learner.digest and list(run.store.sampled) == list(whole.store.sampled)
