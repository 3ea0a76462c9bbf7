"""What `leyden dev` counts in the episodes of its rollouts, what it prints meanwhile, and how it fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from forked_commands import run_command
from msgspec.structs import replace
from smallepisodes import call, episode
from trainings import AGENT, Training

from leyden.config import read_config, read_file
from leyden.episodes import Episode
from leyden.local import dev
from leyden.local.dev import run_dev, summarise
from leyden.records import Call, Span

CONFIG = read_config(
    {"run": "dev", "agent": "agent.py:solve", "tasks": "tasks.jsonl", "reward": "agent.py:score", "model": "spark"}
)


def uses(id: str, tool: str, **fields: Any) -> Call:
    tool_call = {"id": id, "type": "function", "function": {"name": tool, "arguments": "{}"}}
    return call(id, response={"role": "assistant", "content": "", "tool_calls": [tool_call]}, **fields)


def result(id: str, text: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def test_a_failed_tool_is_what_the_signals_call_one() -> None:
    calls = [
        uses("a", "search"),
        uses("b", "search", messages=(result("a", "Error: no such table"),)),
        uses("c", "count", messages=(result("b", "errors in the log: 3"),)),
        call("d", messages=(result("c", "2"),), response={"role": "assistant", "content": "2"}),
    ]
    attributes = {"openinference.span.kind": "TOOL", "tool.name": "count", "tool_call.id": "c"}
    ran = Span("0" * 32, "c" * 16, None, "count", "internal", 0, 1, "error", "out of memory", attributes)
    report = summarise(CONFIG, [replace(episode(0, 1.0, calls), spans=(ran,))], Path("runs/dev"))
    assert report.tools == {"search": 2, "count": 1}
    assert report.tools_failed == {"search": 1, "count": 1}


def grouped(group: str, *rewards: float) -> list[Episode]:
    found = [episode(index, reward, [call(f"{group}{index}")]) for index, reward in enumerate(rewards)]
    return [replace(one, rollout=replace(one.rollout, group=group, task=group)) for one in found]


def test_nothing_is_trained_of_a_group_with_equal_rewards() -> None:
    episodes = [*grouped("a", 1.0, 1.0), *grouped("b", 0.0, 1.0, 1.0), *grouped("c", 0.0, 0.0), *grouped("d", 1.0)]
    report = summarise(CONFIG, episodes, Path("runs/dev"))
    assert (report.groups, report.groups_flat) == (4, 2)
    assert (report.trained, report.calls_trained, report.tokens_trained) == (
        4,
        4,
        12,
    )  # one rollout has no other to equal
    assert report.left_out == {"in a flat group": 4}


def test_a_group_with_equal_rewards_is_trained_if_other_terms_have_a_gradient() -> None:
    config = replace(CONFIG, algorithm=replace(CONFIG.algorithm, entropy=0.01))
    report = summarise(config, grouped("a", 1.0, 1.0), Path("runs/dev"))
    assert (report.trained, report.groups_flat, report.left_out) == (2, 0, {})


def test_advantages_that_depend_on_the_position_of_calls_are_reported() -> None:
    """Every first call uses a tool, which is rewarded, and every second one answers."""

    def rollout(group: str, index: int) -> Episode:
        calls = [
            uses(f"{group}{index}", "search"),
            call(f"{group}{index}-answer", messages=(result(f"{group}{index}", "2"),)),
        ]
        made = episode(index, float(index), calls)
        return replace(made, rollout=replace(made.rollout, group=group, task=group))

    episodes = [rollout(group, index) for group in "abcd" for index in (0, 1)]
    signals = replace(CONFIG.signals, tool_succeeded=3.0)
    by_turn = replace(CONFIG, algorithm=replace(CONFIG.algorithm, credit="stepwise"), signals=signals)
    by_group = replace(by_turn, algorithm=replace(by_turn.algorithm, compare="group"))
    said = summarise(by_group, episodes, Path("runs/dev")).position_bias
    assert said is not None and "at turn 0" in said
    assert summarise(by_turn, episodes, Path("runs/dev")).position_bias is None


async def test_without_a_terminal_it_prints_how_far_it_is_while_agents_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dev, "_PROGRESS_EVERY_S", 0.2)
    Training(tmp_path)
    (tmp_path / "slow").touch()
    agent = (tmp_path / "agent.py").read_text()
    (tmp_path / "agent.py").write_text(agent.replace('Path("', f'Path("{tmp_path}/'))
    config = read_config({**read_file(tmp_path / "small.toml"), "home": str(tmp_path / "runs")})
    running = asyncio.create_task(run_dev(config, tasks=2, rollouts=2))
    printed = ""
    while "0 of 4 rollouts done; the limit is 600 s" not in printed:
        await asyncio.wait((running,), timeout=0.05)
        assert not running.done(), running.result()
        printed += capsys.readouterr().err
    (tmp_path / "slow").unlink()
    report, _ = await running
    assert report.rollouts == 4


def test_leyden_dev_says_what_was_caught_and_fails_where_nothing_could_be_trained(tmp_path: Path) -> None:
    Training(tmp_path)
    done = run_command("dev", "small.toml", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    caught = json.loads(done.stdout)
    assert caught["outcomes"] == {"succeeded": 8}
    assert (caught["calls"], caught["prompts"]) == (8, {"fresh": 8})
    assert caught["calls_trained"] == 8 - caught["left_out"].get("in a flat group", 0) == 8 - 2 * caught["groups_flat"]
    (tmp_path / "agent.py").write_text(
        "def solve(task):\n    return 'x'\n\n\ndef reward(task, result):\n    return 1.0\n"
    )
    silent = run_command("dev", "small.toml", "--tasks", "1", "--rollouts", "1", cwd=tmp_path)
    assert silent.returncode == 1
    assert "would be trained" in silent.stdout
    assert "no model call reached the gateway: does the agent set its own base URL?" in silent.stderr


def test_leyden_dev_fails_where_no_rollout_succeeded(tmp_path: Path) -> None:
    Training(tmp_path)
    fails = AGENT.replace("    return answer.raise", "    raise KeyError(task['q'])\n    return answer.raise")
    (tmp_path / "agent.py").write_text(fails)
    failed = run_command("dev", "small.toml", "--json", cwd=tmp_path)
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["calls"] == 8
    assert "leyden: no rollout succeeded; 8 of 8 ended with: KeyError: 'q'" in failed.stderr


def test_leyden_dev_ends_with_why_there_are_no_rewards(tmp_path: Path) -> None:
    Training(tmp_path)
    (tmp_path / "mine.py").write_text("def reward(task, result):\n    print(result)\n")
    words = ("--tasks", "1", "--rollouts", "2", "reward=mine.py:reward")
    failed = run_command("dev", "small.toml", *words, cwd=tmp_path)
    assert failed.returncode == 1
    reason = "no call can be trained on (2 no_reward): the reward function returned None: there is no reward"
    assert reason in failed.stderr
