"""`leyden replay`: the agent of a recorded rollout runs again, answered from its record."""

import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_commands import ForkedCommand, start_command
from trainings import Training

from leyden import dev
from leyden.cli import main

ASKS_TWICE = """

def twice(task):
    return solve({"question": solve(task) and task["question"] + " Sure?"})


def curious(task):
    return solve({"question": solve(task) and task["question"] + " Really?"})


def always(task):
    return 0.25


def stops(task):
    found = twice(task)
    breakpoint()
    return found
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an agent and the run `small.dev`, a rollout of two calls."""
    folder = tmp_path_factory.mktemp("recorded")
    Training(folder)
    with (folder / "agent.py").open("a") as agent:
        agent.write(ASKS_TWICE)
    home = str(folder / "runs")
    recorded = dev(folder / "small.toml", agent="agent.py:twice", home=home, limit=1, rollouts=1, seed=1)
    assert recorded.calls == 2
    return folder


def replayed(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    """What `leyden replay` says of the first rollout."""
    capsys.readouterr()
    status = main(["replay", "small.dev", "dev-0.0", "--home", str(folder / "runs"), "--json", *words])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    found: dict[str, Any] = json.loads(printed.out)
    return found


def test_an_agent_runs_against_its_record(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = replayed(capsys, folder)
    assert (same["calls"], same["replayed"], same["sampled"], same["difference"]) == (2, 2, 0, None)
    assert same["outcome"] == "succeeded" and same["reward"] == same["reward_recorded"]
    other = replayed(capsys, folder, "reward=agent.py:always")
    assert (other["replayed"], other["reward"], other["reward_recorded"]) == (2, 0.25, same["reward"])

    changed = replayed(capsys, folder, "agent=agent.py:curious")
    assert (changed["replayed"], changed["outcome"]) == (1, "engine_error")
    assert changed["difference"].startswith("call 2: message 1 (user) was ") and "Really?" in changed["difference"]
    onward = replayed(capsys, folder, "--from", "1", "--model", "spark")
    assert (onward["calls"], onward["replayed"], onward["sampled"], onward["outcome"]) == (1, 1, 1, "succeeded")

    for words, refusal in (
        (["small.dev", "dev-9.0"], "dev-9.0"),
        (["small.dev", "dev-0.0", "--from", "1"], "name one with --model"),
        (["small.dev", "dev-0.0", "--from", "3", "--model", "spark"], "made 2 calls"),
        (["small.dev", "dev-0.0", "rollout.replay=false"], "`rollout.replay` is false"),
    ):
        assert main(["replay", *words, "--home", str(folder / "runs")]) == 1
        said = capsys.readouterr().err
        assert refusal in said and said.startswith("leyden: ") and said.count("\n") == 1, said


def test_a_breakpoint_has_the_terminal_of_the_command(folder: Path) -> None:
    terminal, given = os.openpty()
    words = ["small.dev", "dev-0.0", f"agent={folder}/agent.py:stops", "--json"]
    command = start_command(
        "replay", *words, "--home", str(folder / "runs"), stdin=given, stdout=subprocess.PIPE, text=True
    )
    try:
        read_until(terminal, command, "(Pdb) ")
        os.write(terminal, b"'six times seven is ' + str(6 * 7)\n")
        read_until(terminal, command, "is 42")
        os.write(terminal, b"found = 'changed'\n")
        read_until(terminal, command, "(Pdb) ")
        os.write(terminal, b"continue\n")
        said, _ = command.communicate(timeout=120)
    finally:
        command.kill()
        os.close(given)
        os.close(terminal)
    replayed = json.loads(said)
    assert (replayed["replayed"], replayed["outcome"]) == (2, "succeeded")
    assert replayed["reward"] == len("changed") % 2


def read_until(terminal: int, command: ForkedCommand, words: str) -> None:
    """Read what the debugger writes up to some words."""
    seen = ""
    while words not in seen:
        assert command.poll() is None, seen
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 4096).decode()
