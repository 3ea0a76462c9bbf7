"""`leyden rescore`: new rewards for rollouts that are over, from a folder, a live server's folder, or a server."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import ServerProcess

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.cli import main
from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome
from leyden.records import Purpose, Reward, Task
from leyden.store.read import queries
from leyden.store.store import Store

GRADERS = """
def length(task, result):
    if result == "":
        raise ValueError("nothing to measure")
    return len(result) / task["most"]

def rank(group):
    order = sorted(group, key=lambda episode: len(episode.attempt.result))
    return {episode.rollout.id: order.index(episode) for episode in order}

def one(task):
    return 1.0

def some(result):
    return 1.0 if len(result) > 2 else None
"""
SUCCEEDED = Outcome(Ending.SUCCEEDED)
ILL = Outcome(Ending.NO_REWARD, "the grader is ill")


async def fill(url: str, key: str) -> None:
    """A run whose group has two successes, one without a reward, a failure and an empty one; and one under way."""
    async with Remote(url, key) as remote:
        await remote.create_run(RunSpec("r"))
        await remote.enqueue("r", GroupSpec("g", Task("t", {"most": 4}), size=5))
        await remote.enqueue("r", GroupSpec("e", Task("t", {"most": 4}), size=1, purpose=Purpose.EVAL))
        await remote.enqueue("r", GroupSpec("open", Task("t", {"most": 4}), size=2))
        ends = {
            "g.0.1": FinishRequest(SUCCEEDED, "ab", (Reward("final", 1.0, source="reward"),)),
            "g.1.1": FinishRequest(
                SUCCEEDED, "abcd", (Reward("final", 0.25, name="style"), Reward("f", 0.5, name="truth"))
            ),
            "g.2.1": FinishRequest(ILL, "a"),
            "g.3.1": FinishRequest(Outcome(Ending.AGENT_ERROR, "it fell")),
            "g.4.1": FinishRequest(SUCCEEDED, "", (Reward("final", 0.125),)),
            "e.0.1": FinishRequest(SUCCEEDED, "abc", (Reward("final", 0.75),)),
            "open.0.1": FinishRequest(SUCCEEDED, "abc", (Reward("final", 0.0),)),
        }
        for lease in await remote.lease(LeaseRequest("w", count=8)):
            if lease.attempt.id in ends:
                await remote.finish("r", lease.attempt.id, ends[lease.attempt.id])


Rescore = Callable[..., Any]


EVERYWHERE = ("left home", "live home", "server")


@pytest.fixture(params=EVERYWHERE[:1])
def rescore(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Run the command on such a run; what it says as JSON, or as text, or the mistake."""
    for name in ("LEYDEN_URL", "LEYDEN_KEY", "LEYDEN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graders.py").write_text(GRADERS)
    home = tmp_path / "runs" / "r"
    with ServerProcess(home) as server:
        asyncio.run(fill(server.url, server.admin_key))
        where = ["--home", tmp_path / "runs"]
        if request.param == "left home":
            server.kill()
        elif request.param == "server":
            where = ["--server", server.url, "--home", home]

        def run(*arguments: object) -> str:
            status = main(["rescore", "r", *map(str, arguments), *map(str, where)])
            said = capsys.readouterr()
            assert status == (1 if said.err else 0)
            return said.err or said.out

        yield run


def episodes(home: Path) -> dict[str, Episode]:
    async def read() -> dict[str, Episode]:
        async with Remote((home / "url").read_text().strip(), (home / "admin.key").read_text().strip()) as remote:
            found = [*await remote.group_episodes("r", "g"), *await remote.group_episodes("r", "e")]
            return {episode.rollout.id: episode for episode in found}

    async def look() -> dict[str, Episode]:
        store = await Store(home / "leyden.db").start()
        try:
            found = [*await store.read(queries.group_episodes, "r", "g")]
            found += await store.read(queries.group_episodes, "r", "e")
            return {episode.rollout.id: episode for episode in found}
        finally:
            await store.close()

    try:
        return asyncio.run(read())
    except OSError:  # the server is gone
        return asyncio.run(look())


@pytest.mark.parametrize("rescore", EVERYWHERE, indirect=True)
def test_new_rewards_are_in_force_and_the_old_ones_stay(rescore: Rescore, tmp_path: Path) -> None:
    home = tmp_path / "runs" / "r"
    dry = json.loads(rescore("--reward", "graders.py:length", "--dry-run", "--json"))
    assert episodes(home)["g.0"].final_reward(-1.0) == 1.0
    done = json.loads(rescore("--reward", "graders.py:length", "--json"))
    assert (dry["dry_run"], done["dry_run"]) == (True, False)
    assert sorted(dry["rollouts"], key=lambda one: one["rollout"]) == sorted(
        done["rollouts"], key=lambda one: one["rollout"]
    )
    found = episodes(home)
    assert {name: episode.final_reward(-1.0) for name, episode in found.items()} == {
        "g.0": 0.5,
        "g.1": 1.0,  # in place of the two that its agent had given
        "g.2": 0.25,
        "g.3": -1.0,
        "g.4": 0.125,  # what fails leaves what was
        "e.0": 0.75,
    }
    assert found["g.2"].attempt.outcome == SUCCEEDED  # it counts again
    assert found["g.2"].rollout.outcome == SUCCEEDED
    assert [reward.source for reward in found["g.1"].rewards] == ["agent", "agent", "rescore graders.py:length"]
    again = {one["rollout"]: one for one in json.loads(rescore("--reward", "graders.py:one", "--json"))["rollouts"]}
    assert (again["g.2"]["before"], again["g.2"]["after"]) == (0.25, 1.0)
    assert set(again) == {"g.0", "g.1", "g.2", "g.4", "e.0", "open.0"}
    assert len(episodes(home)["g.1"].rewards) == 4


def test_a_table_says_what_changed(rescore: Rescore) -> None:
    text = rescore("--reward", "graders.py:length")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert rows["train"] == ["5", "0.469", "0.525", "3", "1", "0", "1"]
    assert rows["eval"] == ["1", "0.750", "0.750", "0", "0", "0", "0"]
    assert "ValueError: nothing to measure" in text
    assert "'rescore graders.py:length') are in effect; the old ones are kept" in text
    assert "nothing was written" in rescore("--reward", "graders.py:one", "--dry-run")


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_none_is_no_reward_and_no_failure(rescore: Rescore, tmp_path: Path, dry: tuple[str, ...]) -> None:
    text = rescore("--reward", "graders.py:some", *dry)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert rows["train"] == ["5", "0.469", "0.781", "2", "0", "3", "0"]
    assert episodes(tmp_path / "runs" / "r")["g.0"].final_reward(-1.0) == 1.0  # what it had


def test_a_function_of_a_group_ranks_those_that_are_over(rescore: Rescore) -> None:
    done = {one["rollout"]: one for one in json.loads(rescore("--reward", "graders.py:rank", "--json"))["rollouts"]}
    assert {name: one["after"] for name, one in done.items()} == {"g.0": 2, "g.1": 3, "g.2": 1, "g.4": 0, "e.0": 0}


def test_mistakes_are_one_line(rescore: Rescore) -> None:
    assert "name one with --reward" in rescore()
    assert "there is no file" in rescore("--reward", "nowhere.py:f")
    assert "no run 'r'" not in rescore("--reward", "graders.py:nope")
