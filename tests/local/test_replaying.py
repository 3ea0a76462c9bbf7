"""`leyden dev --replay`: rollouts run again, answered from their own record."""

from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console
from smallepisodes import call, episode
from trainings import Training

from leyden.cli.dev import print_report
from leyden.config import ConfigError, read_config, read_file
from leyden.episodes import Episode
from leyden.local.dev import run_dev
from leyden.local.replaying import compare
from leyden.records import CallStatus, DivergedCall


def answered_again(recorded: Episode, calls: int, left: DivergedCall | None = None) -> Episode:
    """A rollout that repeated some calls of a recorded one, and then sampled another."""
    origin = recorded.attempt.id
    repeated = [replace(made, origin=origin) for made in recorded.calls[:calls]]
    found = episode(1, 1.0, [*repeated, call("new")])
    return replace(found, attempt=replace(found.attempt, diverged=left))


def test_every_call_is_a_prefix_and_the_first_difference_of_each_rollout_counts() -> None:
    recorded = episode(0, 1.0, [call("a"), call("b", parent="a"), call("c", status=CallStatus.FAILED)])
    left = DivergedCall(2, 'message 1 (user) was "Monday" and is "Tuesday"')
    again = [answered_again(recorded, *how) for how in ((2,), (1, left), (1, left), (0,))]
    report = compare((recorded, one) for one in again)
    assert (report.prefixes, report.exact, report.share) == (8, 4, 0.5)
    assert report.differences == {f"call 2: {left.why}": 2, "the agent ended before it asked again": 1}
    assert compare([]).share == 1.0


async def test_an_agent_with_a_clock_in_a_prompt_is_told_which(tmp_path: Path) -> None:
    Training(tmp_path)
    agent = (tmp_path / "agent.py").read_text()
    clock = 'task["question"] + str(time.time_ns() if "1 plus" in task["question"] else "")'
    (tmp_path / "agent.py").write_text(agent.replace('task["question"]', clock))
    given = {**read_file(tmp_path / "small.toml"), "home": str(tmp_path / "runs"), "held_out": 0, "seed": 1}
    config = read_config(given)
    report, episodes = await run_dev(config, tasks=8, rollouts=1, replay=True)
    assert report.replay is not None
    assert (report.rollouts, report.replay.prefixes, report.replay.exact) == (8, 8, 7)
    output = StringIO()
    print_report(Console(file=output, width=400), report, episodes)
    assert "replayed exactly" in output.getvalue() and "7 of 8 calls" in output.getvalue()
    assert "1 × left the record: call 1: message 1 (user) was " in output.getvalue()
    off = read_config({**given, "rollout": {"replay": False}})
    with pytest.raises(ConfigError, match=r"`rollout\.replay` is false"):
        await run_dev(off, replay=True)
