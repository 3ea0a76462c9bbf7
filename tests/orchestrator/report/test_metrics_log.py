"""A line a step, with every rollout accounted for; steps that will happen again are taken out."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from smallepisodes import call, episode
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from leyden.api.client import Remote
from leyden.api.views import SeriesQuery
from leyden.api.wire import Cursor, RunSpec
from leyden.config import read_config
from leyden.learner.protocol import UpdateMetrics
from leyden.orchestrator.credit.samples import StepAccounting
from leyden.orchestrator.disk_room import is_disk_full
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.report.metrics_log import MetricsLog, evaluation_metrics, read_metrics, step_metrics
from leyden.orchestrator.report.plot import draw_image, draw_text
from leyden.orchestrator.report.sinks import opened_sinks
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.call_usage import CallUsage
from leyden.orchestrator.rollouts.evaluation import EvaluationResult
from leyden.records import DEFAULT_POLICY, Call, Reward, VersionRun


def report(step: int, **fields: Any) -> StepReport:
    accounting = StepAccounting(requested=4, trained=3)
    accounting.outcomes.update({"succeeded": 3, "lost": 1})
    accounting.excluded["lost"] = 1
    metrics = [UpdateMetrics(loss=-0.1, grad_norm=2.0, tokens=30, computed=90, saved=45, statistics={"entropy": 1.5})]
    return StepReport(step, [1.0, 0.0, 0.0], accounting, metrics, sampled=40, **fields)


async def test_a_step_is_written_down_and_sent(remote: Remote, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    await remote.create_run(RunSpec("r"))
    journal = MetricsLog(path, DEFAULT_POLICY, 0, remote, "r", ())
    journal.measured(0, EvaluationResult(0.25, 0.1, 4, {"succeeded": 4}), [])
    journal.step(report(1, held_out=EvaluationResult(0.5, 0.1, 4, {"succeeded": 3, "timeout": 1})), 0.0)
    await journal.close()
    before, first = read_metrics(path, DEFAULT_POLICY)
    assert before["held_out/reward"] == 0.25
    assert first["rollouts/requested"] == first["rollouts/trained"] + first["rollouts/excluded/lost"] == 4
    assert (first["held_out/reward"], first["held_out/timeout"]) == (0.5, 1)
    assert (first["held_out/error"], first["held_out/counted"]) == (0.1, 4)
    assert first["tokens/trained"] == 30
    sent = (await remote.list_metrics("r", Cursor())).metrics
    assert {metric.name: metric.value for metric in sent if metric.step == 1} == {
        name: value for name, value in first.items() if name not in ("step", "time", "policy")
    }


def test_rewards_are_reported_by_role_and_kind_and_tokens_by_staleness() -> None:
    one = report(3, by_role={"writer": [1.0, 0.0], "critic": [1.0]}, by_kind={"easy": [0.5]})
    published = Publications(2, [4, 6, 7])  # two publications after version 5
    one.count_tokens([Call("c", completion_ids=(1, 2, 3, 4), versions=(VersionRun(3, 7), VersionRun(1, 5)))], published)
    one.count_tokens([], published)
    found = step_metrics(one)
    assert (found["reward/role/writer"], found["reward/role/critic"], found["reward/kind/easy"]) == (0.5, 1.0, 0.5)
    assert (found["staleness/mean"], found["staleness/max"]) == (0.5, 2)
    assert (found["staleness/tokens/0"], found["staleness/tokens/2"]) == (3, 1)
    assert (found["length/call"], found["length/rollout"]) == (4, 2)


def test_the_parts_of_rewards_are_reported_without_their_weights() -> None:
    parts = [Reward("final.0", 1.0, name="correct"), Reward("final.1", 0.5, name="format", weight=0.1)]
    one, config = report(3), read_config({"run": "r", "agent": "a", "tasks": "t"})
    one.add_episodes([replace(episode(0, 1.0, []), rewards=tuple(parts))], Publications(0, [0]), config, False)
    found = step_metrics(one)
    assert (found["reward/part/correct"], found["reward/part/format"], one.rewards[-1]) == (1.0, 0.5, 1.05)


async def test_roles_and_kinds_of_any_text_are_recorded(remote: Remote, tmp_path: Path) -> None:
    await remote.create_run(RunSpec("r"))
    journal = MetricsLog(tmp_path / "metrics.jsonl", DEFAULT_POLICY, 0, remote, "r", ())
    roles = {"Researcher & Writer": [1.0], "检索": [0.5], "math (hard)": [0.25], "": [0.0], "\ud800a": [1.0]}
    kinds = {"a,\n b": [1.0], "a b": [0.0], "x" * 1000: [0.5], "x" * 999: [0.0]}
    journal.step(report(1, by_role=roles, by_kind=kinds), 0.0)
    await journal.close()
    series = await remote.run_series("r", SeriesQuery(10, "reward/role/*,reward/kind/*,reward/mean"))
    names = ("role/Researcher & Writer", "role/检索", "role/math (hard)", "role/-", "role/a", "kind/a b")
    by_name = {f"reward/{name}": value for name, value in zip(names, (1.0, 0.5, 0.25, 0.0, 1.0, 0.5), strict=True)}
    by_name |= {f"reward/kind/{'x' * 160}": 0.25, "reward/mean": 1 / 3}
    assert {name: one.values[0] for name, one in series.items()} == pytest.approx(by_name)


def test_only_the_trained_policys_tokens_are_counted() -> None:
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "policy": "writer"})
    calls = [call("a", 4, policy="writer"), call("b", 3, policy="judge"), call("c", 2, policy="upstream")]
    one = StepReport(1, [], StepAccounting())
    one.add_episodes([episode(0, 1.0, calls)], Publications(0, [0]), config, False)
    assert (one.lengths, one.rollout_lengths, one.sampled, one.rewards) == ([4], [4], 4, [1.0])


def test_flat_groups_that_succeed_and_that_fail_are_told_apart() -> None:
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "evaluation": {"success": 0.5}})
    one = StepReport(1, [], StepAccounting(groups_flat=3))
    for number, rewards in enumerate([(1.0, 1.0), (0.5, 0.5), (0.25, 0.25), (0.0, 1.0), (0.0, None), (0.0, 0.0)]):
        group = [episode(index, reward, [call("a", 2, finish="length")]) for index, reward in enumerate(rewards)]
        named = [replace(each, rollout=replace(each.rollout, group=f"g{number}")) for each in group]
        one.add_episodes(named, Publications(0, [0]), config, False)
    found = step_metrics(one)
    assert (found["groups/flat"], found["groups/flat_succeeded"], found["groups/flat_failed"]) == (3, 2, 2)
    assert (found["calls/per_rollout"], found["calls/tool_calls_per_rollout"], found["calls/cut"]) == (1, 0, 1)


def test_an_evaluation_has_the_calls_of_its_rollouts() -> None:
    usage = CallUsage(rollouts=4, calls=6, tool_calls=2, cut=3)
    found = evaluation_metrics(EvaluationResult(0.5, 0.1, 4, {"succeeded": 4}, usage=usage))
    assert {name: value for name, value in found.items() if "/calls/" in name} == {
        "held_out/calls/per_rollout": 1.5,
        "held_out/calls/tool_calls_per_rollout": 0.5,
        "held_out/calls/cut": 0.5,
    }


async def test_a_resumed_run_removes_the_metrics_of_steps_that_are_repeated(remote: Remote, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "policy": DEFAULT_POLICY}) + "\n" for step in range(6)) + '{"step": 6, "rew'
    )
    MetricsLog(path, DEFAULT_POLICY, 3, remote, "r", ())
    assert [row["step"] for row in read_metrics(path, DEFAULT_POLICY)] == [0, 1, 2, 3]
    MetricsLog(path, DEFAULT_POLICY, 0, remote, "r", ())
    assert read_metrics(path, DEFAULT_POLICY) == []


async def test_each_policy_writes_its_own_lines(remote: Remote, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    await remote.create_run(RunSpec("r"))
    logs = [MetricsLog(path, DEFAULT_POLICY, 0, remote, "r", ()), MetricsLog(path, "critic", 0, remote, "r", ())]
    for log in logs:
        log.step(report(1), 0.0)
        await log.close()
    (default,), (critic,) = read_metrics(path, DEFAULT_POLICY), read_metrics(path, "critic")
    assert (default["policy"], critic["policy"]) == (DEFAULT_POLICY, "critic")
    assert default["tokens/trained"] == critic["tokens/trained"] == 30
    sent = (await remote.list_metrics("r", Cursor())).metrics
    assert [one.policy for one in sent if one.name == "tokens/trained"] == [DEFAULT_POLICY, "critic"]
    MetricsLog(path, "critic", 0, remote, "r", ())
    assert read_metrics(path, DEFAULT_POLICY) == [default] and read_metrics(path, "critic") == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
async def test_a_step_that_a_full_disk_failed_in_one_sink_is_in_every_place_once(
    remote: Remote, tmp_path: Path
) -> None:
    await remote.create_run(RunSpec("full"))
    config = read_config({"run": "full", "agent": "a", "tasks": "t", "report": ["tensorboard"]})
    path = tmp_path / "metrics.jsonl"
    with opened_sinks(config, tmp_path) as sinks:
        log = MetricsLog(path, DEFAULT_POLICY, 0, remote, "full", sinks)
        log.step(report(1), 0.0)
        (events,) = (tmp_path / "tensorboard").iterdir()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (events.stat().st_size, before[1]))
        try:
            with pytest.raises(OSError) as full:
                log.step(report(2), 0.0)
            assert is_disk_full(full.value)  # so the trainer tries again
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [line["step"] for line in read_metrics(path, DEFAULT_POLICY)] == [1, 2]  # there was room for the line
        log.step(report(2), 0.0)
        log.step(report(3), 0.0)
        await log.close()
    assert [line["step"] for line in read_metrics(path, DEFAULT_POLICY)] == [1, 2, 3]
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("tokens/trained")
    assert [event.step for event in shown] == [1, 2, 3]
    sent = (await remote.list_metrics("full", Cursor())).metrics
    assert [one.step for one in sent if one.name == "tokens/trained"] == [1, 2, 3]


def test_a_curve_is_plotted_from_incomplete_metrics(tmp_path: Path) -> None:
    rows = [{"step": 0, "held_out/reward": 0.25}, {"step": 1, "reward/mean": 0.5}, {"step": 2, "held_out/reward": 1.0}]
    text = draw_text(rows)
    assert "1.00" in text and "0.25" in text and text.count("●") == 3  # two points and the legend
    assert draw_text([{"step": 1, "reward/mean": 0.5}]).endswith("· training")  # nothing is held out
    assert draw_text([]) == "no rewards yet"
    draw_image(rows, "r", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
