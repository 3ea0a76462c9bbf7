"""Training on groups while others run: the bound on staleness, and that nothing is lost or trained on twice."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from scripted_training import Crash, ScriptedLearner, ScriptedRun, SlowStore
from smallepisodes import call

from leyden.api.wire import GroupSpec
from leyden.learner.protocol import Update, UpdateMetrics
from leyden.outcomes import Ending
from leyden.records import Call

QUICK, ALL = 25, 4000
"""Schedules of the quick test and of the long one."""


def position_of(group: str) -> int:
    return int(group.split("-")[1])


def teaches_sometimes(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """Of seven tasks in a row three leave something to compare, three are flat, and one has no rollout that counts."""
    kind = position_of(spec.id) % 7 if spec.id.startswith("train") else 0
    ending = Ending.LOST if kind == 6 else Ending.SUCCEEDED
    return float(index % 2 if kind < 3 else kind % 2), [call(f"{spec.id}.{index}")], ending


def hard(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """The same with rollouts of two calls, and of the tasks that leave something to compare one of three succeeds."""
    reward, calls, ending = teaches_sometimes(spec, index)
    return reward, [*calls, call(f"{spec.id}.{index}b")][1 if spec.origin else 0 :], ending


class CheckedRun(ScriptedRun):
    """A run that notes the staleness of every token that it trains on, computed from what was published."""

    def __init__(self, folder: Path, seed: int, **training: Any) -> None:
        self.trained: dict[int, set[str]] = {}
        """By step, the groups that were trained on."""
        self.staleness: list[int] = []
        self.weights: dict[int, set[str]] = {}
        """By step, the weights after it; more than one if it was repeated with another result."""
        self.versions: dict[int, int] = {}
        """By step, the version that was published after it."""
        self.limit_changed = False
        """Whether the limit was changed at a kill: a repeated step may then leave out other tokens."""
        self._step = 0
        settings = {"steps": 6, "group_size": 3 if "hard_tasks" in training else 2, **training}
        super().__init__(
            folder,
            hard if "hard_tasks" in training else teaches_sometimes,
            held_out=1,
            random=Random(seed),
            training=settings,
            checkpoints={"every": 2},
            evaluation={"every": 2, "rollouts": 2},
        )

    def open(self) -> None:
        super().open()
        run = self

        class Learner(ScriptedLearner):
            async def start_step(self, policy: str, step: int) -> float:
                run._step = step
                run.versions[step - 1] = run.store.versions[-1]
                run.trained[step] = set()
                return await super().start_step(policy, step)

            async def accumulate(self, policy: str, update: Update) -> UpdateMetrics:
                for sample in update.samples:
                    run.trained[run._step].add(sample.call.rpartition(".")[0])
                    run._note_staleness(sample.call, sample.token_indices)
                return await super().accumulate(policy, update)

            async def apply(self, policy: str) -> None:
                await super().apply(policy)
                run.weights.setdefault(run._step, set()).add(self.digest)

        self.learner = Learner(self.journal, self.checkpoints)

    def _note_staleness(self, name: str, tokens: Sequence[int]) -> None:
        calls = {one.id: one for episode in self.store.sampled[name.rpartition(".")[0]] for one in episode.calls}
        versions = [run.number for run in calls[name].versions for _ in range(run.tokens)]
        published = sorted(set(self.store.versions))
        found = [sum(one > versions[token] for one in published) for token in tokens]
        assert max(found) <= self.config.training.max_staleness
        self.staleness += found

    async def finish(self, kills: Random | None) -> None:
        """Train to the end; with `kills` the process is killed now and then and started again."""
        for _ in range(4 if kills is not None else 0):
            assert kills is not None
            if not await self.killed_at(kills.randrange(2, 150)):
                break
            if kills.random() < 0.2:
                self.limit_changed = True
                self.with_settings(max_staleness=kills.randint(0, 4))
        self.versions[6] = (await self.start()).version

    async def killed_at(self, entry: int) -> bool:
        """Train until the process is killed, and begin a new one; false if the training ended before."""
        self.journal.crash_at = entry
        try:
            await self.start()
        except Crash:
            saved = max(self.checkpoints, default=0)
            assert isinstance(self.store, SlowStore)
            self.store.restart(self.checkpoints[saved][0].version if saved else 0)
            self.open()
            return True
        self.journal.crash_at = None
        return False


async def check(folder: Path, seed: int, killed: bool) -> CheckedRun:
    random = Random(seed)
    limit, per_step = random.randint(0, 4), random.randint(1, 3)
    flat = random.choice(("keep", "refill"))
    order = random.choice(("shuffled", "by_difficulty"))
    settings = {"max_staleness": limit, "tasks_per_step": per_step, "flat_groups": flat, "task_order": order}
    run = CheckedRun(folder, seed, **settings, **({"hard_tasks": "continue"} if random.random() < 0.5 else {}))
    await run.finish(random if killed else None)
    state, _ = run.checkpoints[6]
    closed = [position_of(name) for step in range(1, 7) for name in run.store.credits[step]]
    still_open = [group.position for group in state.open_groups]
    assert sorted(closed + still_open) == list(range(state.position)), "every group belongs to one step, or is open"
    assert killed or all(len(one.open_groups) <= limit * per_step for one, _ in run.checkpoints.values())
    tested = [one for name, found in run.store.sampled.items() if name.startswith("eval") for one in found]
    evaluated: dict[int, set[int]] = {}
    for one in tested:
        versions = {run.number for call in one.calls for run in call.versions}
        evaluated.setdefault(int(one.rollout.group.split("-")[1]), set()).update(versions)
    assert {step: len(found) for step, found in evaluated.items()} == dict.fromkeys((0, 2, 4, 6), 1)
    if not run.limit_changed:  # every version is of the same weights before and after a kill
        assert all(evaluated[step] == {run.versions[step]} for step in evaluated)
        assert all(len(found) == 1 for found in run.weights.values())
    for step in range(1, 7):
        assert run.trained[step] <= run.store.credits[step]
        assert len(run.trained[step]) <= per_step
    for report in run.observer.reports:
        accounting = report.accounting
        assert accounting.requested == accounting.trained + sum(accounting.excluded.values())
        # after a kill a group may be requested later than before, and has older tokens
        assert killed or accounting.tokens_stale == 0
    return run


@pytest.mark.parametrize("killed", [False, True], ids=["to the end", "killed"])
async def test_no_schedule_breaks_the_bound_or_loses_a_group(tmp_path: Path, killed: bool) -> None:
    found = [await check(tmp_path / f"{seed}", seed, killed) for seed in range(QUICK)]
    assert max(staleness for run in found for staleness in run.staleness) > 1  # agents do go on
    # after a kill other tasks would be drawn for some groups, which keep the ones that they have
    assert bool(sum(run.store.conflicts for run in found)) == killed


@pytest.mark.slow
async def test_no_schedule_of_thousands_breaks_the_bound_or_loses_a_group(tmp_path: Path) -> None:
    for seed in range(QUICK, ALL):
        await check(tmp_path / f"{seed}", seed, killed=bool(seed % 3))


async def test_a_step_takes_groups_that_are_finished_and_waits_for_those_that_would_be_too_old(tmp_path: Path) -> None:
    overtaken = 0
    for seed in range(6):
        run = CheckedRun(tmp_path / f"{seed}", seed, max_staleness=1, tasks_per_step=2)
        await run.finish(None)
        order = [position for step in range(1, 7) for position in sorted(map(position_of, run.trained[step]))]
        overtaken += order != sorted(order)
        assert max(run.staleness) == 1
    assert overtaken  # by groups that finished before an older one


async def test_groups_that_finish_before_they_are_needed_are_requested_later(tmp_path: Path) -> None:
    """At any limit, agents that are faster than training are one step ahead of it."""
    run = ScriptedRun(tmp_path, training={"steps": 9, "max_staleness": 4}, checkpoints={"every": 1})
    await run.start()
    assert [len(state.open_groups) for state, _ in run.checkpoints.values()] == [2] * 8 + [0]


async def test_flat_groups_are_replaced_until_the_step_is_full(tmp_path: Path) -> None:
    kept = CheckedRun(tmp_path / "keep", 1, tasks_per_step=3)
    refilled = CheckedRun(tmp_path / "refill", 1, tasks_per_step=3, flat_groups="refill", max_refill=3)
    for run in (kept, refilled):
        await run.finish(None)
    assert min(len(groups) for groups in kept.trained.values()) < 3
    assert {len(groups) for groups in refilled.trained.values()} == {3}
    flat = [report.accounting.groups_flat for report in refilled.observer.reports]
    assert sum(flat) > 0 and refilled.observer.reports[1].accounting.excluded["flat group"] > 0


async def test_a_step_whose_groups_are_all_flat_goes_on_without_an_update(tmp_path: Path) -> None:
    run = CheckedRun(tmp_path, 1, tasks_per_step=2, flat_groups="refill", max_refill=1)
    run.store.script = lambda spec, index: (1.0, [call(f"{spec.id}.{index}")], Ending.SUCCEEDED)
    await run.finish(None)
    assert not run.staleness and [report.accounting.groups_flat for report in run.observer.reports] == [4] * 6


async def test_tokens_that_are_too_old_are_left_out_and_counted(tmp_path: Path) -> None:
    """A run that is resumed with a lower limit has groups that are older than it allows."""
    run = CheckedRun(tmp_path, 11, steps=9, max_staleness=4, tasks_per_step=2)
    while not run.checkpoints:
        assert await run.killed_at(100)
    assert run.checkpoints[max(run.checkpoints)][0].open_groups
    run.staleness.clear()
    run.with_settings(max_staleness=0)
    await run.start()
    stale = sum(report.accounting.tokens_stale for report in run.observer.reports)
    assert stale > 0 and set(run.staleness) == {0}
    assert run.observer.reports[0].accounting.calls_excluded["too old"] > 0
