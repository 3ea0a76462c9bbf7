"""Several policies trained from the same rollouts: each learns from its own calls and rewards, as if it were alone."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from randomness import moments
from rich.console import Console
from scripted_policies import TWO, PoliciesRun, two_calls
from smallepisodes import call, episode

from leyden.api.wire import GroupSpec
from leyden.config import read_config
from leyden.engine.protocol import EngineLost
from leyden.episodes import Episode
from leyden.learner.errors import TrainingError
from leyden.orchestrator.algorithm.resolve import algorithms_of
from leyden.orchestrator.credit.own_rewards import ForeignRewards
from leyden.orchestrator.health.roles import check_roles
from leyden.orchestrator.report.console import ConsoleReport
from leyden.orchestrator.report.metrics_log import step_metrics
from leyden.outcomes import Ending
from leyden.records import Call, Reward, RewardKind, Span

WRITING = Span("t", "1" * 16, None, "node", "internal", 0, 1, attributes={"gen_ai.agent.name": "writer"})


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
    metrics = [step_metrics(report) for report in run.observer.reports]
    rates = [
        (one.policy, some.get("training/learning_rate"))
        for one, some in zip(run.observer.reports, metrics, strict=True)
    ]
    assert rates[:6] == [("writer", 0.1), ("checker", None)] * 2 + [("writer", None), ("checker", 0.1)]


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


def test_a_reward_that_a_rescoring_replaced_counts_for_no_policy() -> None:
    """Also not for one to which the new reward is foreign."""
    before, after = Reward("b", 1.0, source="agent"), Reward("a", 2.0, name="mine", source="rescoring")
    made = replace(episode(0, None, [call("a")], Ending.SUCCEEDED), rewards=(before, after))
    assert ForeignRewards(frozenset({"mine"})).without(made).final_reward(0.0) is None


async def test_each_policy_gets_the_advantages_of_its_own_reward(tmp_path: Path) -> None:
    policies = {"writer": {"roles": "writer", "rewards": ["wrote"]}, "checker": {"rewards": ["checked"]}}
    run = PoliciesRun(tmp_path, policies, training={"steps": 1, "tasks_per_step": 1})

    def named(found: Episode) -> Episode:
        index = float(found.rollout.index)
        return replace(found, rewards=(Reward("w", index, name="wrote"), Reward("c", -index, name="checked")))

    run.store.recorded = named
    await run.train()
    assert run.updates("writer") == ["writer accumulate train-0.0.writer:-0.71 train-0.1.writer:+0.71"]
    assert run.updates("checker") == ["checker accumulate train-0.0.checker:+0.71 train-0.1.checker:-0.71"]


async def test_the_own_reward_of_a_step_is_of_the_rollouts_that_begin_with_their_task(tmp_path: Path) -> None:
    policies = {"writer": {"roles": "writer", "rewards": ["wrote"]}, "checker": {"rewards": ["checked"]}}
    settings = {"steps": 3, "tasks_per_step": 2, "group_size": 4, "hard_tasks": "continue"}

    def rest(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        _, calls, ending = two_calls(spec, index)
        return None, calls[spec.origin.calls :] if spec.origin else calls, ending

    run = PoliciesRun(tmp_path, policies, rest, training=settings)

    def named(found: Episode) -> Episode:
        first = float(found.rollout.index == 0)
        return replace(found, rewards=(Reward("w", first, name="wrote"), Reward("c", first, name="checked")))

    run.store.recorded = named
    await run.train()
    assert any(report.branches.rollouts for report in run.observer.reports)
    for report in run.observer.reports:
        assert len(report.own_rewards) == len(report.rewards) == 8 - report.branches.rollouts


async def test_rollouts_that_reward_or_ask_other_policies_alone_are_called_so(tmp_path: Path) -> None:
    policies = {"writer": {"roles": "writer", "rewards": ["wrote"]}, "checker": {"rewards": ["checked"]}}

    def checker_calls_once(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        _, calls, ending = two_calls(spec, index)
        return None, calls[: 2 - index], ending

    run = PoliciesRun(
        tmp_path, policies, checker_calls_once, training={"steps": 1, "tasks_per_step": 1, "min_group": 1}
    )

    def named(found: Episode) -> Episode:
        index = found.rollout.index
        given = (Reward("w", float(index), name="wrote"), *([Reward("c", 1.0, name="checked")] if index else []))
        return replace(found, rewards=given)

    run.store.recorded = named
    await run.train()
    writer, checker = run.observer.reports
    assert (writer.own_rewards, checker.own_rewards) == ([0.0, 1.0], [1.0])
    assert step_metrics(checker)["reward/own"] == 1.0
    assert checker.accounting.excluded == {"rewarded for other policies only": 1, "only calls of other policies": 1}
    assert [one.excluded for one in run.credited["checker", 1].calls] == ["rewarded for other policies only"]
    console = Console(file=StringIO(), width=500)
    ConsoleReport(console, 1, several=True).step(checker, 0.0)
    assert "no update: rewarded for other policies only" in console.file.getvalue()


async def test_a_kill_at_any_moment_leaves_policies_that_end_as_if_it_had_not_been(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"training": {"steps": 3}, "checkpoints": {"every": 1}}
    whole = PoliciesRun(tmp_path / "whole", TWO, **settings)
    await whole.train()
    expected = {name: whole.learners[name].digest for name in TWO}
    for at in moments(len(whole.journal)):
        run = PoliciesRun(tmp_path / str(at), TWO, **settings)
        await run.kill(run.train(), at)
        states = await run.train()
        assert {name: run.learners[name].digest for name in TWO} == expected, at
        assert [state.version for state in states.values()] == [3, 3]


async def test_an_engine_that_fails_leaves_the_record_of_the_other_policy_whole(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"training": {"steps": 3}, "checkpoints": {"every": 1}}
    whole = PoliciesRun(tmp_path / "whole", TWO, **settings)
    await whole.train()
    run = PoliciesRun(tmp_path / "failing", TWO, **settings)
    run.failing_engine = "checker", 2
    with pytest.raises(EngineLost):
        await run.train()
    assert run.saved["writer"].keys() == run.saved["checker"].keys() == {1}
    assert "writer publish 2" in run.journal and "checker publish 2" not in run.journal
    assert run.credited["writer", 2] == whole.credited["writer", 2]
    assert run.updates("writer") == whole.updates("writer")[:2]
    run.open()
    await run.train()
    assert {name: run.learners[name].digest for name in TWO} == {name: whole.learners[name].digest for name in TWO}
    assert run.credited == whole.credited


def test_a_role_that_only_a_span_knows_is_refused() -> None:
    made = replace(episode(0, 1.0, [call("a", policy="checker", span=WRITING.span_id)]), spans=(WRITING,))
    with pytest.raises(TrainingError, match="known only from a span"):
        check_roles([made], {"writer": "writer"})
    check_roles([made], {"another": "writer"})
    check_roles([made], {})


async def test_a_run_whose_roles_only_spans_know_ends_with_the_reason(tmp_path: Path) -> None:
    def checker_answers(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        return float(index % 2), [call(f"{spec.id}.{index}", policy="checker", span=WRITING.span_id)], Ending.SUCCEEDED

    run = PoliciesRun(tmp_path, TWO, checker_answers)
    run.store.recorded = lambda found: replace(found, spans=(WRITING,))
    with pytest.raises(TrainingError, match="known only from a span"):
        await run.train()
    assert not run.updates("checker")


async def test_a_policy_without_calls_stays_as_it_is(tmp_path: Path) -> None:
    def writer_only(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        return float(index % 2), [call(f"{spec.id}.{index}", policy="writer")], Ending.SUCCEEDED

    run = PoliciesRun(tmp_path, TWO, writer_only, training={"steps": 2})
    states = await run.train()
    assert [states[name].version for name in TWO] == [2, 0]
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "policies": TWO})
    assert list(algorithms_of(config)) == ["writer", "checker"]
