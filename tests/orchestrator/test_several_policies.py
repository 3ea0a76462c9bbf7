"""Several policies trained from the same rollouts: each learns from its own calls and rewards, as if it were alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_training import Crash, Journal, ScriptedBackend, ScriptedLearner, ScriptedRun
from smallepisodes import call, episode

from leyden.api.wire import GroupSpec
from leyden.config import read_config, trained_policies
from leyden.episodes import Episode
from leyden.learner.errors import TrainingError
from leyden.learner.protocol import TrainerState
from leyden.orchestrator.algorithm.resolve import algorithms_of
from leyden.orchestrator.credit.own_rewards import ForeignRewards
from leyden.orchestrator.health.routed_roles import check_roles
from leyden.orchestrator.loop import Trainer
from leyden.orchestrator.pipeline import RunParts, build_pipeline
from leyden.outcomes import Ending
from leyden.records import Call, Reward, RewardKind, Span, StepCredits

TWO: dict[str, Any] = {"writer": {"roles": "writer"}, "checker": {}}
Checkpoints = dict[str, dict[int, tuple[TrainerState, str]]]


def two_calls(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """Every second rollout succeeds; each policy makes a call."""
    calls = [call(f"{spec.id}.{index}.{name}", policy=name) for name in ("writer", "checker")]
    return float(index % 2), calls, Ending.SUCCEEDED


class NamedJournal:
    """Writes what happens to one policy into the journal of a run."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal, self._name = journal, name

    def write(self, entry: str) -> None:
        self._journal.write(f"{self._name} {entry}")


class EveryLearner:
    """A learner of several policies, each of which is scripted."""

    def __init__(self, learners: dict[str, ScriptedLearner]) -> None:
        self.learners = learners

    def __getattr__(self, method: str) -> Any:
        return lambda policy, *arguments, **named: getattr(self.learners[policy], method)(policy, *arguments, **named)


class PoliciesRun(ScriptedRun):
    """A scripted run with several policies. What it credits is kept by policy."""

    def __init__(self, folder: Path, policies: dict[str, Any], script: Any = two_calls, **settings: Any) -> None:
        self.saved: Checkpoints = {name: {} for name in policies}
        super().__init__(folder, script, policies=policies, **settings)
        self.credited: dict[tuple[str, int], StepCredits] = {}
        record = self.store.record_credits

        async def record_credits(run: str, credits: StepCredits) -> None:
            self.credited[credits.policy, credits.step] = credits
            await record(run, credits)

        self.store.record_credits = record_credits  # type: ignore[method-assign]

    async def train(self) -> dict[str, TrainerState]:
        """Train from the last step of which every policy has a checkpoint."""
        names = trained_policies(self.config)
        common = max(set.intersection(*(set(self.saved[name]) for name in names)), default=0)
        for name in names:
            self.saved[name] = {step: found for step, found in self.saved[name].items() if step <= common}
        journals: dict[str, Any] = {name: NamedJournal(self.journal, name) for name in names}
        learner: Any = EveryLearner({name: ScriptedLearner(journals[name], self.saved[name]) for name in names})
        backends: Any = {name: ScriptedBackend(journals[name], False, False) for name in names}
        store: Any = self.store
        self.learners = learner.learners
        states = {name: await learner.restore(name) for name in names}
        parts = RunParts(store, backends, learner, (self.observer,))
        pipeline = build_pipeline(self.config, algorithms_of(self.config), self.tasks, parts, states, self._folder)
        return await Trainer(self.config, pipeline, states).run(self.stop)

    def updates(self, policy: str) -> list[str]:
        """The gradients of a policy, as its samples and advantages."""
        return [entry for entry in self.journal if entry.startswith(f"{policy} accumulate")]


async def test_a_step_trains_every_policy_on_its_own_calls(tmp_path: Path) -> None:
    run = PoliciesRun(tmp_path, TWO, training={"steps": 1})
    states = await run.train()
    for name in TWO:
        assert run.updates(name) == [
            f"{name} accumulate "
            + " ".join(f"train-{g}.{i}.{name}:{sign}0.71" for g in (0, 1) for i, sign in ((0, "-"), (1, "+")))
        ]
        assert f"{name} publish 1" in run.journal
        assert (states[name].policy, states[name].version, states[name].position) == (name, 1, 2)
        credits = {credit.call: credit for credit in run.credited[name, 1].calls}
        assert set(credits) == {f"train-{g}.{i}.{name}" for g in (0, 1) for i in (0, 1)}
    assert [report.policy for report in run.observer.reports] == ["writer", "checker"]
    assert all(report.accounting.trained == 4 for report in run.observer.reports)


async def test_a_policy_is_updated_as_if_it_were_the_only_one(tmp_path: Path) -> None:
    both = PoliciesRun(tmp_path / "both", TWO, training={"steps": 3, "updates_per_step": 2})
    await both.train()
    for name in TWO:
        others_fixed = {one: {**policy, "trained": one == name} for one, policy in TWO.items()}
        alone = PoliciesRun(tmp_path / name, others_fixed, training={"steps": 3, "updates_per_step": 2})
        await alone.train()
        assert alone.updates(name) == both.updates(name)
        assert alone.learners[name].digest == both.learners[name].digest


async def test_policies_take_turns(tmp_path: Path) -> None:
    run = PoliciesRun(tmp_path, TWO, training={"steps": 5, "alternate": 2})
    states = await run.train()
    assert [states[name].version for name in TWO] == [3, 2]
    assert [len(run.updates(name)) for name in TWO] == [3, 2]
    left_out = {credit.excluded for credit in run.credited["checker", 1].calls}
    assert left_out == {"not its turn"}
    assert run.observer.reports[1].accounting.excluded["not its turn"] == 4


async def test_rewards_that_a_policy_lists_and_those_of_calls_are_its_own(tmp_path: Path) -> None:
    step = Reward("s", 5.0, RewardKind.STEP, call="b")
    mine, ours = Reward("m", 2.0, name="mine"), Reward("o", 1.0, name="ours")
    unowned = Reward("u", 0.5, RewardKind.STEP)
    made = episode(0, None, [call("a", policy="writer"), call("b", policy="checker")], Ending.SUCCEEDED)
    made = replace(made, rewards=(step, mine, ours, unowned))
    foreign = ForeignRewards(frozenset({"mine"}), frozenset({"checker"}))
    own = foreign.without(made)
    assert (own.rewards, own.final_reward(0.0)) == ((ours, unowned), 1.0)
    assert ForeignRewards().without(made) is made


async def test_each_policy_gets_the_advantages_of_its_own_reward(tmp_path: Path) -> None:
    policies = {"writer": {"roles": "writer", "rewards": ["wrote"]}, "checker": {"rewards": ["checked"]}}
    run = PoliciesRun(tmp_path, policies, training={"steps": 1, "tasks_per_step": 1})
    made = run.store._episode

    def named(run_name: str, spec: GroupSpec, index: int) -> Episode:
        rewards = (Reward("w", float(index), name="wrote"), Reward("c", float(-index), name="checked"))
        return replace(made(run_name, spec, index), rewards=rewards)

    run.store._episode = named  # type: ignore[method-assign]
    await run.train()
    assert run.updates("writer") == ["writer accumulate train-0.0.writer:-0.71 train-0.1.writer:+0.71"]
    assert run.updates("checker") == ["checker accumulate train-0.0.checker:+0.71 train-0.1.checker:-0.71"]


async def test_a_kill_at_any_moment_leaves_policies_that_end_as_if_it_had_not_been(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"training": {"steps": 3}, "checkpoints": {"every": 1}}
    whole = PoliciesRun(tmp_path / "whole", TWO, **settings)
    await whole.train()
    expected = {name: whole.learners[name].digest for name in TWO}
    for at in range(len(whole.journal)):
        run = PoliciesRun(tmp_path / str(at), TWO, **settings)
        run.journal.crash_at = at
        with pytest.raises(Crash):
            await run.train()
        run.open()
        states = await run.train()
        assert {name: run.learners[name].digest for name in TWO} == expected, at
        assert [state.version for state in states.values()] == [3, 3]


def test_a_role_that_only_a_span_knows_is_refused() -> None:
    span = Span("t", "1" * 16, None, "node", "internal", 0, 1, attributes={"gen_ai.agent.name": "writer"})
    made = replace(episode(0, 1.0, [call("a", policy="checker", span=span.span_id)]), spans=(span,))
    with pytest.raises(TrainingError, match="known only from a span"):
        check_roles([made], {"writer": "writer"})
    check_roles([made], {"another": "writer"})
    check_roles([made], {})


async def test_a_policy_without_calls_stays_as_it_is(tmp_path: Path) -> None:
    def writer_only(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        return float(index % 2), [call(f"{spec.id}.{index}", policy="writer")], Ending.SUCCEEDED

    run = PoliciesRun(tmp_path, TWO, writer_only, training={"steps": 2})
    states = await run.train()
    assert [states[name].version for name in TWO] == [2, 0]
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "policies": TWO})
    assert list(algorithms_of(config)) == ["writer", "checker"]
