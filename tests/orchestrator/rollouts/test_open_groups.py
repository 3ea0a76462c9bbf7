"""Training on groups while others run: the bound on staleness, and that nothing is lost or trained on twice."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_policies import TWO, PoliciesRun
from scripted_training import ScriptedLearner, ScriptedRun, SlowStore
from smallepisodes import call

from leyden.api.wire import GroupSpec
from leyden.learner.protocol import Update, UpdateMetrics
from leyden.outcomes import Ending
from leyden.records import Call, StepCredits

QUICK, ALL = 6, 4000
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


def of_two(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """The same with a call of each of two policies; of the tasks that leave something to compare, two ask only one."""
    reward, (made, *more), ending = teaches_sometimes(spec, index) if not spec.origin else hard(spec, index)
    kind = position_of(spec.id) % 7 if spec.id.startswith("train") else 0
    others = [("writer", "checker"), ("writer",), ("checker",)][kind if kind < 3 else 0]
    return reward, [replace(one, id=f"{one.id}-{who}", policy=who) for one in (made, *more) for who in others], ending


SCRIPTS = {"one": teaches_sometimes, "hard": hard, "two": of_two}
POLICIES: dict[str, dict[str, Any]] = {"policy": {}}


class CheckedRun(PoliciesRun):
    """A run that notes the staleness of every token that it trains on, computed from what was published."""

    def __init__(self, folder: Path, seed: int, policies: dict[str, Any] = POLICIES, **training: Any) -> None:
        self.trained: dict[tuple[str, int], set[str]] = {}
        """By policy and step, the groups that were trained on."""
        self.staleness: list[int] = []
        self.weights: dict[tuple[str, int, int], set[str]] = {}
        """By policy, step and update, the weights after it; more than one if it was repeated with another result."""
        self.versions: dict[tuple[str, int], int] = {}
        """By policy and step, the version that was served after it."""
        self.limit_changed = False
        """Whether the limit was changed at a kill: a repeated step may then leave out other tokens."""
        settings = {"steps": 6, "group_size": 3 if "hard_tasks" in training else 2, **training}
        kind = "two" if len(policies) > 1 else "hard" if "hard_tasks" in training else "one"
        super().__init__(
            folder,
            policies,
            SCRIPTS[kind],
            held_out=1,
            random=Random(seed),
            training=settings,
            checkpoints={"every": 2},
            evaluation={"every": 2, "rollouts": 2},
        )

    @property
    def slow(self) -> SlowStore:
        assert isinstance(self.store, SlowStore)
        return self.store

    def new_learner(self, policy: str, journal: Any) -> ScriptedLearner:
        run, now, updates = self, 0, 0

        class Learner(ScriptedLearner):
            async def start_step(self, policy: str, step: int) -> float:
                nonlocal now, updates
                now, updates = step, 0
                run.versions[policy, step - 1] = run.slow.published[policy][-1]
                run.trained[policy, step] = set()
                return await super().start_step(policy, step)

            async def accumulate(self, policy: str, update: Update) -> UpdateMetrics:
                for sample in update.samples:
                    run.trained[policy, now].add(sample.call.rpartition(".")[0])
                    run._note_staleness(policy, sample.call, sample.token_indices)
                return await super().accumulate(policy, update)

            async def apply(self, policy: str) -> None:
                nonlocal updates
                updates += 1
                await super().apply(policy)
                run.weights.setdefault((policy, now, updates), set()).add(self.digest)

        return Learner(journal, self.saved[policy])

    def _note_staleness(self, policy: str, name: str, tokens: Sequence[int]) -> None:
        calls = {one.id: one for episode in self.store.sampled[name.rpartition(".")[0]] for one in episode.calls}
        versions = [run.number for run in calls[name].versions for _ in range(run.tokens)]
        published = sorted(set(self.slow.published[policy]))
        found = [sum(one > versions[token] for one in published) for token in tokens]
        assert max(found) <= self.config.training.max_staleness
        self.staleness += found

    def closed(self, policy: str, step: int) -> set[str]:
        """The groups whose calls of a policy a step has credited or left out."""
        credits = self.credited.get((policy, step), StepCredits(step, ()))
        return {one.attempt.rsplit(".", 2)[0] for one in credits.calls}

    async def stopped_at(self, entry: int) -> bool:
        """Train until Ctrl-C, and begin a new process; false if the training ended before."""

        def write() -> None:
            self.slow.tick()
            if len(self.journal) == entry:
                self.stop.set()

        self.journal.on_write = write
        states = await self.train()
        self.stop.clear()
        self.open()
        return any(state.step < self.config.training.steps for state in states.values())

    async def finish(self, kills: Random | None = None) -> None:
        """Train to the end; with `kills` the process is killed or stopped now and then and started again."""
        for _ in range(4 if kills is not None else 0):
            assert kills is not None
            end = self.killed_at if kills.random() < 0.7 else self.stopped_at
            if not await end(kills.randrange(2, 150)):
                break
            if kills.random() < 0.2:
                self.limit_changed = True
                self.with_settings(max_staleness=kills.randint(0, 4))
        states = await self.train()
        self.versions |= {(name, state.step): state.version for name, state in states.items()}


async def check(folder: Path, seed: int, killed: bool) -> CheckedRun:
    random = Random(seed)
    limit, per_step = random.randint(0, 4), random.randint(1, 3)
    settings = {
        "max_staleness": limit,
        "tasks_per_step": per_step,
        "flat_groups": random.choice(("keep", "refill")),
        "max_refill": random.choice((0, 1, 2)),
        "task_order": random.choice(("shuffled", "by_difficulty")),
        **({"hard_tasks": "continue"} if random.random() < 0.5 else {}),
        "updates_per_step": random.randint(1, min(2, per_step)),
        "epochs": random.choice((1, 1, 2)),
    }
    several = random.random() < 0.4
    if several:
        settings["alternate"] = random.choice((0, 0, 1, 2))
    run = CheckedRun(folder, seed, TWO if several else POLICIES, **settings)
    await run.finish(random if killed else None)
    closed = {step: set.union(*(run.closed(policy, step) for policy in run.saved)) for step in range(1, 7)}
    for policy, saved in run.saved.items():
        state, digest = saved[6]
        positions = [position_of(name) for names in closed.values() for name in names]
        positions += [group.position for group in state.open_groups]
        assert sorted(positions) == list(range(state.position)), "every group belongs to one step, or is open"
        assert killed or all(len(one.open_groups) <= limit * per_step for one, _ in saved.values())
        assert run.learners[policy].digest == digest
        for step in range(1, 7):
            trained = run.trained.get((policy, step), set())  # it may be another's turn
            assert trained <= run.closed(policy, step) and len(trained) <= per_step
        if settings["task_order"] == "shuffled":
            requested = [run.store.sampled[f"train-{position}"][0] for position in range(state.position)]
            begun = [one.task for one in requested if one.rollout.origin is None]
            assert begun == [run.tasks.at(place) for place in range(len(begun))], "no task is passed over"
    tested = [one for name, found in run.store.sampled.items() if name.startswith("eval") for one in found]
    evaluated: dict[tuple[str, int], set[int]] = {}
    for one in tested:
        for made in one.calls:
            of = made.policy, int(one.rollout.group.split("-")[1])
            evaluated.setdefault(of, set()).update(run.number for run in made.versions)
    assert {of: len(found) for of, found in evaluated.items()} == {
        (policy, step): 1 for policy in run.saved for step in (0, 2, 4, 6)
    }
    if not run.limit_changed:  # every version is of the same weights before and after a kill
        assert all(found == {run.versions[of]} for of, found in evaluated.items() if of in run.versions)
        assert all(len(found) == 1 for found in run.weights.values())
    for report in run.observer.reports:
        accounting = report.accounting
        assert accounting.requested == accounting.trained + sum(accounting.excluded.values())
        # after a kill a group may be requested later than before, and has older tokens
        assert killed or accounting.tokens_stale == 0
    return run


@pytest.mark.parametrize("killed", [False, True], ids=["to the end", "killed"])
async def test_no_schedule_breaks_the_bound_or_loses_a_group(tmp_path: Path, killed: bool) -> None:
    found = [await check(tmp_path / f"{seed}", seed, killed) for seed in range(QUICK)]
    assert any(staleness for run in found for staleness in run.staleness)  # agents do go on


@pytest.mark.slow
async def test_no_schedule_of_thousands_breaks_the_bound_or_loses_a_group(tmp_path: Path) -> None:
    for seed in range(QUICK, ALL):
        await check(tmp_path / f"{seed}", seed, killed=bool(seed % 3))


async def test_a_step_takes_groups_that_are_finished_and_waits_for_those_that_would_be_too_old(tmp_path: Path) -> None:
    overtaken = 0
    for seed in range(6):
        run = CheckedRun(tmp_path / f"{seed}", seed, max_staleness=1, tasks_per_step=2)
        await run.finish()
        order = [position for step in range(1, 7) for position in sorted(map(position_of, run.trained["policy", step]))]
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
        await run.finish()
    assert min(len(groups) for groups in kept.trained.values()) < 3
    assert {len(groups) for groups in refilled.trained.values()} == {3}
    flat = [report.accounting.groups_flat for report in refilled.observer.reports]
    assert sum(flat) > 0 and refilled.observer.reports[1].accounting.excluded["flat group"] > 0


async def test_a_step_whose_groups_are_all_flat_goes_on_without_an_update(tmp_path: Path) -> None:
    run = CheckedRun(tmp_path, 1, tasks_per_step=2, flat_groups="refill", max_refill=1)
    run.store.script = lambda spec, index: (1.0, [call(f"{spec.id}.{index}")], Ending.SUCCEEDED)
    await run.finish()
    assert not run.staleness and [report.accounting.groups_flat for report in run.observer.reports] == [4] * 6


async def test_tokens_that_are_too_old_are_left_out_and_counted(tmp_path: Path) -> None:
    """A run that is resumed with a lower limit has groups that are older than it allows."""
    run = CheckedRun(tmp_path, 11, steps=9, max_staleness=4, tasks_per_step=2)
    while not run.saved["policy"]:
        assert await run.killed_at(100)
    newest = max(run.saved["policy"])
    assert run.saved["policy"][newest][0].open_groups
    run.staleness.clear()
    run.with_settings(max_staleness=0)
    await run.train()
    stale = sum(report.accounting.tokens_stale for report in run.observer.reports)
    assert stale > 0 and set(run.staleness) == {0}
    assert run.observer.reports[0].accounting.calls_excluded["too old"] > 0
