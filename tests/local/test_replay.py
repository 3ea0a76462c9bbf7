"""`leyden replay`: the agent of a recorded rollout runs again, answered from its record."""

import json
from pathlib import Path
from typing import Any

import pytest
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
"""


def replayed(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    """What `leyden replay` says of the first rollout."""
    capsys.readouterr()
    status = main(["replay", "small.dev", "dev-0.0", "--home", str(folder / "runs"), "--json", *words])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    found: dict[str, Any] = json.loads(printed.out)
    return found


def test_an_agent_runs_against_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Training(tmp_path)
    with (tmp_path / "agent.py").open("a") as agent:
        agent.write(ASKS_TWICE)
    home = str(tmp_path / "runs")
    recorded = dev(tmp_path / "small.toml", agent="agent.py:twice", home=home, limit=1, rollouts=1, seed=1)
    assert recorded.calls == 2

    same = replayed(capsys, tmp_path)
    assert (same["calls"], same["replayed"], same["sampled"], same["difference"]) == (2, 2, 0, None)
    assert same["outcome"] == "succeeded" and (same["reward"],) == (same["reward_recorded"],) == recorded.rewards
    other = replayed(capsys, tmp_path, "reward=agent.py:always")
    assert (other["replayed"], other["reward"], other["reward_recorded"]) == (2, 0.25, *recorded.rewards)

    changed = replayed(capsys, tmp_path, "agent=agent.py:curious")
    assert (changed["replayed"], changed["outcome"]) == (1, "engine_error")
    assert changed["difference"].startswith("call 2: message 1 (user) was ") and "Really?" in changed["difference"]
    onward = replayed(capsys, tmp_path, "--from", "1", "--model", "spark")
    assert (onward["calls"], onward["replayed"], onward["sampled"], onward["outcome"]) == (1, 1, 1, "succeeded")

    for words, refusal in (
        (["small.dev", "dev-9.0"], "dev-9.0"),
        (["small.dev", "dev-0.0", "--from", "1"], "name one with --model"),
        (["small.dev", "dev-0.0", "--from", "3", "--model", "spark"], "made 2 calls"),
        (["small.dev", "dev-0.0", "rollout.replay=false"], "`rollout.replay` is false"),
    ):
        assert main(["replay", *words, "--home", home]) == 1
        said = capsys.readouterr().err
        assert refusal in said and said.startswith("leyden: ") and said.count("\n") == 1, said
