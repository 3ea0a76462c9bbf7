"""The command line: the same facts for a person and as JSON, from disk or from a server; mistakes in one line."""

import argparse
import asyncio
import errno
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from databases import empty_store
from serving import ServerProcess

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.cli import main, parser
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import (
    Call,
    CallCredit,
    Purpose,
    Reward,
    RewardKind,
    RunSettings,
    Sampling,
    StepCredits,
    Task,
    VersionRun,
)
from leyden.runs.run_folder import RunFolder
from leyden.server.control.keys import KeyKind
from leyden.store.store import Store

SLY = "\x1b[31mred [bold]loud[/bold] \x9b2J"
"""What would steer a terminal, or the library that writes to it."""


ADDING = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


class Ran:
    """What a command said, and how it ended."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    @property
    def document(self) -> Any:
        """What it printed with --json."""
        assert (self.status, self.err) == (0, "")
        return json.loads(self.out)

    @property
    def text(self) -> str:
        """What it printed for a person."""
        assert (self.status, self.err) == (0, "")
        assert not set(self.out) & {"\x1b", "\x9b"}
        return self.out

    def mistake(self, status: int) -> str:
        """The one line that it printed about what is wrong."""
        assert (self.status, self.out) == (status, "")
        assert self.err.startswith("leyden")
        assert self.err.count("\n") == 1, self.err
        return self.err


Leyden = Callable[..., Ran]


@pytest.fixture
def leyden(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ran]:
    """Run a command, in a folder where nothing is, on a wide terminal."""
    for name in ("LEYDEN_URL", "LEYDEN_KEY", "LEYDEN_HOME", "LEYDEN_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ran:
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as refusal:
            assert isinstance(refusal.code, int)
            status = refusal.code
        said = capsys.readouterr()
        return Ran(status, said.out, said.err)

    return run


async def fill(server: ServerProcess) -> None:
    async with Remote(server.url, server.admin_key) as remote:
        await remote.create_run(RunSpec("calc", RunSettings(max_attempts=2), config={"model": "spark"}))
        await remote.create_run(RunSpec("empty"))
        await remote.enqueue("calc", GroupSpec("sums", Task("add", {"question": "1 + 1"}), size=3))
        good, bad = await remote.lease(LeaseRequest("worker-1", count=2))
        first = Call(
            "call-1",
            prompt_ids=(1, 2, 3),
            completion_ids=(4, 5),
            logprobs=(-0.1, -0.2),
            versions=(VersionRun(2, 7),),
            role="planner",
            messages=({"role": "user", "content": f"what is 1 + 1? {SLY}"},),
            response={"role": "assistant", "content": "let me see", "tool_calls": [ADDING]},
        )
        second = Call("call-2", parent="call-1", kept_ids=5, kept_messages=2, prompt_ids=(6,), completion_ids=(7,))
        await remote.record_calls("calc", good.attempt.id, [first, second])
        await export(server, good.key)
        rewards = (Reward("r", 0.75), Reward("s", 0.5, RewardKind.STEP, "brevity", source="judge", call="call-1"))
        output = "".join(f"line {number} {SLY}\n" for number in range(1, 31))
        await remote.finish(
            "calc", good.attempt.id, FinishRequest(Outcome(Ending.SUCCEEDED), {"answer": 2}, rewards, output)
        )
        credits = (
            CallCredit(good.attempt.id, "call-1", 1.25, 0.5, 0.0625, 2),
            CallCredit(good.attempt.id, "call-2", excluded="no logprobs"),
        )
        await remote.record_credits("calc", StepCredits(3, credits))
        failed = Outcome(Ending.AGENT_ERROR, f"ZeroDivisionError: give another divisor {SLY}")
        await remote.finish("calc", bad.attempt.id, FinishRequest(failed))


async def export(server: ServerProcess, key: str) -> None:
    """A tool's span beneath the agent's."""
    outer = {"traceId": "ab" * 16, "spanId": "aa" * 8, "name": "agent", "startTimeUnixNano": 1, "endTimeUnixNano": 2}
    inner = {**outer, "spanId": "bb" * 8, "parentSpanId": "aa" * 8, "name": f"tool {SLY}", "endTimeUnixNano": 2500001}
    inner["status"] = {"code": 2, "message": "no such table"}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [inner, outer]}]}]}
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as session,
        session.post(f"{server.url}/v1/traces", json=body),
    ):
        pass


@pytest.fixture(scope="module")
def filled(server: ServerProcess) -> ServerProcess:
    """A server with an empty run and one of three rollouts: one succeeded, one failed, one is in the queue."""
    asyncio.run(fill(server))
    return server


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home folder that a server, killed since, has left behind."""
    with ServerProcess(tmp_path_factory.mktemp("left")) as server:
        asyncio.run(fill(server))
        return server.home


@pytest.fixture(params=["live home", "dead home", "server", "server by environment", "database"])
def where(
    request: pytest.FixtureRequest, filled: ServerProcess, left: Path, leyden: Leyden, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The arguments that say where to read."""
    match request.param:
        case "live home":
            return ["--home", str(filled.home)]
        case "dead home":
            return ["--home", str(left)]
        case "server":
            return ["--server", filled.url, "--key-file", str(filled.key_file(KeyKind.VIEWER))]
        case "server by environment":
            monkeypatch.setenv("LEYDEN_URL", filled.url + "/")
            monkeypatch.setenv("LEYDEN_KEY", filled.key(KeyKind.VIEWER))
            return []
        case _:
            return ["--store", str(left / "leyden.db")]


# The same facts from everywhere


def test_runs_as_json(leyden: Leyden, where: list[str]) -> None:
    calc, empty = leyden("runs", "--json", *where).document
    assert {name: calc[name] for name in calc if name not in ("created", "card", "bytes")} == {
        "id": "calc",
        "rollouts": {"succeeded": 1, "agent_error": 1, "queued": 1},
        "groups": 1,
        "groups_finished": 0,
        "calls": 2,
        "tokens": 3,
        "mean_reward": 0.375,
        "groups_unscored": 0,
    }
    assert (empty["id"], empty["rollouts"], empty["mean_reward"]) == ("empty", {}, None)


def test_runs_for_a_person(leyden: Leyden, where: list[str]) -> None:
    text = leyden("runs", *where).text
    assert text.splitlines()[0].split()[:4] == ["run", "started", "state", "step"]
    assert re.search(r"^calc .* (running|idle) ", text, re.MULTILINE)
    for fact in ("calc", "0 of 1", "1 agent_error, 1 queued, 1 succeeded", "0.375", "empty"):
        assert fact in text


async def evaluate(server: ServerProcess) -> None:
    """A run with an evaluation of two tasks, one rollout each."""
    async with Remote(server.url, server.admin_key) as remote:
        await remote.create_run(RunSpec("measured"))
        for reward in (0.5, 1.0):
            group = GroupSpec(f"eval-3-{reward}", Task(f"t{reward}", {}), 1, Purpose.EVAL, step=3)
            await remote.enqueue("measured", group)
            (leased,) = await remote.lease(LeaseRequest("w", run="measured"))
            done = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("r", reward),))
            await remote.finish("measured", leased.attempt.id, done)


def test_a_reward_comes_with_its_error_and_the_rollouts_it_rests_on(leyden: Leyden, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "home") as server:
        asyncio.run(evaluate(server))
        for source in (
            ["--home", server.home],
            ["--server", server.url, "--key-file", server.key_file(KeyKind.VIEWER)],
        ):
            text = leyden("runs", *source).text
            assert "0.750 ± 0.250" in text and "2 held-out" in text and "0.750 ± 0.250 at 3" in text
            (found,) = leyden("runs", "--json", *source).document
            assert (found["card"]["reward"], found["card"]["counted"]) == (0.75, 2)


def test_a_run_as_json(leyden: Leyden, where: list[str]) -> None:
    shown = leyden("show", "calc", "--json", *where).document
    assert shown["run"]["config"] == {"model": "spark"}
    assert shown["summary"]["tokens"] == 3
    assert [rollout["id"] for rollout in shown["rollouts"]] == ["sums.0", "sums.1", "sums.2"]
    assert [(rollout["outcome"] or {}).get("ending") for rollout in shown["rollouts"]] == [
        "succeeded",
        "agent_error",
        None,
    ]
    assert [(rollout["reward"], rollout["calls"]) for rollout in shown["rollouts"]] == [
        (0.75, 2),
        (0.0, 0),
        (None, None),
    ]


def test_settings_are_shown_as_a_configuration_has_them(leyden: Leyden, tmp_path: Path) -> None:
    async def write() -> None:
        store = await Store(tmp_path / "leyden.db").start()
        settings = RunSettings(reward_function=True, sampling=Sampling(temperature=0.5, top_p=1.0), roles={"a": "[b]"})
        await store.create_run(RunSpec("r", settings))
        await store.close()

    asyncio.run(write())
    text = leyden("show", "r", "--home", str(tmp_path)).text
    assert 'settings  reward_function = true, sampling.temperature = 0.5, roles.a = "[b]"\n' in text


def test_a_run_for_a_person(leyden: Leyden, where: list[str]) -> None:
    text = leyden("show", "calc", *where).text
    for fact in ("2 calls, 3 sampled tokens", "reward 0.375 (all rollouts)", "sums.2", "queued"):
        assert fact in text
    assert "settings  max_attempts = 2\n" in text  # not those that are as usual
    assert "settings  defaults" in leyden("show", "empty", *where).text
    assert "ZeroDivisionError: give another divisor" in text
    assert "[bold]loud[/bold]" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["sums.0", "add", "train", "succeeded", "0.750", "2"] in rows
    assert ["rollout", "task", "for", "state", "reward", "calls", "message"] in rows  # nothing was tried twice


def test_a_rollout_as_json(leyden: Leyden, where: list[str]) -> None:
    shown = leyden("show", "calc", "sums.0", "--json", *where).document
    assert shown["rollout"]["state"] == "finished"
    assert shown["task"] == {"id": "add", "input": {"question": "1 + 1"}}
    (episode,) = shown["episodes"]
    assert [call["id"] for call in episode["calls"]] == ["call-1", "call-2"]
    assert [reward["value"] for reward in episode["rewards"]] == [0.75, 0.5]
    assert [span["span_id"] for span in episode["spans"]] == ["bb" * 8, "aa" * 8]
    assert episode["attempt"]["result"] == {"answer": 2}
    assert len(episode["output"].splitlines()) == 30
    (step,) = shown["credits"]
    assert (step["step"], step["policy"]) == (3, "policy")
    trained, left = step["calls"]
    assert (trained["value"], trained["advantage"], trained["weight"], trained["tokens"]) == (1.25, 0.5, 0.0625, 2)
    assert left["excluded"] == "no logprobs"


def test_a_rollout_for_a_person(leyden: Leyden, where: list[str]) -> None:
    text = leyden("show", "calc", "sums.0", *where).text
    for fact in (
        "sums.0  succeeded, task add, for train",
        '"question":"1 + 1"',
        "attempt 1: succeeded, reward 0.750",
        "worker worker-1",
        "call call-1  3 + 2 tokens, fresh, finish stop, role planner, policy version 7",
        "> user: what is 1 + 1?",
        '< assistant: let me see add({"a": 1})',
        "call call-2  6 + 1 tokens",
        "= step 3: trained on 2 tokens, value 1.25, advantage 0.5, weight 0.0625",
        "= step 3: not trained on: no logprobs",
        "final reward reward = 0.75 (weight 1) for the attempt, from agent",
        "step reward brevity = 0.5 (weight 1) for call call-1, from judge",
        "2.5 ms error no such table",
        'result  {"answer":2}',
        "output (the last 20 of 30 lines; --json has all)",
        "  | line 11 ",
        "  | line 30 ",
    ):
        assert fact in text
    assert "attempt 1: agent_error, reward 0.000" in leyden("show", "calc", "sums.1", *where).text
    assert "line 10 " not in text
    assert text.index("agent  0.0 ms") < text.index("── tool")


def test_a_rollout_may_be_named_after_options(leyden: Leyden, where: list[str]) -> None:
    between = leyden("show", "calc", *where, "--limit", 5, "sums.0", "--json").document
    assert between == leyden("show", "calc", "sums.0", "--json", *where).document


def test_a_rollout_without_attempts(leyden: Leyden, where: list[str]) -> None:
    assert leyden("show", "calc", "sums.2", "--json", *where).document["episodes"] == []
    assert "sums.2  queued" in leyden("show", "calc", "sums.2", *where).text


def test_an_unknown_run_or_rollout_is_a_failure_in_one_line(leyden: Leyden, where: list[str]) -> None:
    said = leyden("show", "nope", *where).mistake(1)
    assert "no run 'nope'" in said and ": there are calc" in said
    assert "no rollout 'nope'" in leyden("show", "calc", "nope", *where).mistake(1)
    assert "; that is a group, whose first rollout is sums.0" in leyden("show", "calc", "sums", *where).mistake(1)
    assert "no rollout 'nope'" in leyden("show", "calc", "--after", "nope", *where).mistake(1)


def test_a_long_list_is_shown_in_parts(leyden: Leyden, where: list[str]) -> None:
    assert "more: leyden show calc --after sums.1" in leyden("show", "calc", "--limit", 2, *where).text
    rest = leyden("show", "calc", "--limit", 2, "--after", "sums.1", "--json", *where).document
    assert [rollout["id"] for rollout in rest["rollouts"]] == ["sums.2"]


def test_tasks_are_shown_by_success_rate(leyden: Leyden, where: list[str]) -> None:
    listed = leyden("show", "calc", "--tasks", "--json", *where).document
    (task,) = listed["tasks"]
    assert (task["groups"], task["rollouts"], task["success"], task["reward"]) == (1, 3, 0.0, 0.375)
    text = leyden("show", "calc", "--tasks", *where).text
    assert "0.375" in text and "1 of 1 task\n" in text
    assert "leave out sums.0" in leyden("show", "calc", "sums.0", "--tasks", *where).mistake(1)


def test_rollouts_are_shown_by_outcome_step_and_reward(leyden: Leyden, where: list[str]) -> None:
    def shown(*filters: object) -> list[str]:
        found = leyden("show", "calc", *filters, "--json", *where).document["rollouts"]
        return [rollout["id"] for rollout in found]

    assert shown("--outcome", "agent_error") == ["sums.1"]
    assert shown("--outcome", "agent_error,queued") == ["sums.1", "sums.2"]
    assert shown("--reward-below", 0.5) == ["sums.1"]
    assert shown("--step", 1) == []
    assert shown("--newest", "--limit", 2) == ["sums.2", "sums.1"]
    assert shown("--limit", 5000) == ["sums.0", "sums.1", "sums.2"]
    two = ("show", "calc", "--outcome", "succeeded,queued", *where)
    assert "1 of 2 that match (--limit 2 shows all)\n" in leyden(*two, "--limit", 1).text
    assert "2 of 2 that match\n" in leyden(*two).text
    assert "--after" in leyden("show", "calc", "--newest", "--after", "sums.1", *where).mistake(1)


async def try_twice(server: ServerProcess, run: str, group: str) -> None:
    async with Remote(server.url, server.admin_key) as remote:
        await remote.create_run(RunSpec(run))
        await remote.enqueue(run, GroupSpec(group, Task("add", {}), size=2))
        lost, good = await remote.lease(LeaseRequest("w", count=2))
        gone = FinishRequest(Outcome(Ending.ENGINE_ERROR, "it is gone"), retry=Retry.FREE)
        await remote.finish(run, lost.attempt.id, gone)
        (again,) = await remote.lease(LeaseRequest("w"))
        for attempt in (again.attempt.id, good.attempt.id):
            await remote.finish(run, attempt, FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("r", 0.5),)))


def test_ids_are_whole_however_narrow_and_attempts_are_there_where_it_took_several(
    leyden: Leyden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, group = "duo.eval-" + 50 * "2", "eval-0-" + 60 * "9"
    with ServerProcess(tmp_path / "home") as server:
        asyncio.run(try_twice(server, run, group))
        monkeypatch.setenv("COLUMNS", "40")
        rows = [line.split() for line in leyden("show", run, "--home", server.home).text.splitlines()]
        assert [f"{group}.0", "add", "train", "succeeded", "0.500", "0", "2", "of", "4"] in rows
        assert [f"{group}.1", "add", "train", "succeeded", "0.500", "0"] in rows
        assert [run] in [line.split()[:1] for line in leyden("runs", "--home", server.home).text.splitlines()]
        assert f"{run} --after {group}.0" in leyden("show", run, "--home", server.home, "--limit", 1).text


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fly"], "fly"),
        (["show"], "RUN (`leyden runs` lists them)"),
        (["show", "a", "--outcome", "lost,bad"], "'bad' is no outcome: there are succeeded"),
        (
            ["train"],
            "arguments are required: CONFIG.toml (`leyden init --from AGENT.py` writes one) (see leyden train --help)",
        ),
        (["show", "a", "b", "c"], "c"),
        (["show", "not an id"], "letters, digits"),
        (["show", "a/b"], "letters, digits"),
        (["show", ".."], "letters, digits"),
        (["show", "a", "x?y=z"], "letters, digits"),
        (["show", "a", "--after", ""], "letters, digits"),
        (["show", "a", "--limit", "0"], "from 1 to"),
        (["show", "a", "--limit", "-3"], "from 1 to"),
        (["show", "a", "--limit", "ten"], "from 1 to"),
        (["show", "a", "--limit"], "--limit"),
        (["runs", "--colour"], "--colour"),
        (["runs", "--server"], "--server"),
        (["serve", "--port", "http"], "from 0 to 65535"),
        (["serve", "--port", "65536"], "from 0 to 65535"),
        (["serve", "--max-body-mb", "0"], "from 1 to"),
        (["serve", "here"], "here"),
        (["serve", "here=there"], "here=there"),
        (["train", "a.toml", "--restart", "--colour"], "--colour"),
    ],
)
def test_a_command_that_makes_no_sense_is_answered_in_one_line(leyden: Leyden, arguments: list[str], said: str) -> None:
    assert said in leyden(*arguments).mistake(2)


def test_an_empty_list_says_where_it_looked(leyden: Leyden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_store(tmp_path / "leyden.db")
    assert leyden("runs", "--home", str(tmp_path)).text == f"no runs yet in {tmp_path}\n"
    empty_store(tmp_path / "empty.db")
    monkeypatch.setenv("LEYDEN_STORE", str(tmp_path / "empty.db"))
    assert "no runs yet in the database that --store or LEYDEN_STORE names" in leyden("runs").text


def test_leyden_alone_lists_its_commands(leyden: Leyden) -> None:
    done = leyden()
    assert done.status == 2 and "train the model behind an agent, or continue a run" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs", "--store", "postgresql://me:secret@host/db"], "LEYDEN_STORE"),
        (["serve", "--store", "postgresql://host/db?password=secret"], "PGPASSWORD"),
        (["serve", "--upstream", "http://me:secret@host/v1"], "LEYDEN_UPSTREAM_KEY"),
        (["serve", "--upstream", "http://secret@host/v1"], "LEYDEN_UPSTREAM_KEY"),
    ],
)
def test_a_secret_on_a_command_line_is_refused_and_not_repeated(
    leyden: Leyden, arguments: list[str], said: str
) -> None:
    line = leyden(*arguments).mistake(2)
    assert said in line and "secret" not in line


def test_the_store_may_be_named_by_the_environment(leyden: Leyden, left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_STORE", str(left / "leyden.db"))
    assert [run["id"] for run in leyden("runs", "--json").document] == ["calc", "empty"]
    for wrong in ("postgresql://me:secret@127.0.0.1:none/db", "postgresql://me:secret@127.0.0.1:1/db?password=secret"):
        monkeypatch.setenv("LEYDEN_STORE", wrong)
        assert "secret" not in leyden("runs").mistake(1)


async def leave_open(folder: Path) -> None:
    """Leave a run with a rollout that a worker has started and one in the queue."""
    store = await Store(folder / "leyden.db").start()
    await store.create_run(RunSpec("mine"))
    await store.enqueue("mine", GroupSpec("sums", Task("add", {}), size=2))
    await store.lease(LeaseRequest("worker-1", run="mine"))
    await store.close()


def test_a_run_that_no_process_holds_is_not_shown_as_running(leyden: Leyden, tmp_path: Path) -> None:
    home = tmp_path / "runs"
    folder = RunFolder(home / "mine")
    asyncio.run(leave_open(folder.path))
    with folder.lock():
        assert leyden("top", "--once", "--json").document["runs"][0]["state"] == "running"
        assert "1 worker, 1 running, 1 queued" in leyden("top", "--once").text
        assert "1 queued, 1 running" in leyden("runs").text
    with ServerProcess(home) as server:
        for where in ([], ["--server", server.url, "--key-file", server.key_file(KeyKind.VIEWER)]):
            view = leyden("top", "--once", "--json", *where).document
            assert [(card["state"], card["rollouts"]) for card in view["runs"]] == [("idle", {"interrupted": 2})]
            assert "0 workers, 0 running, 0 queued" in leyden("top", "--once", *where).text
    assert "2 interrupted" in leyden("runs").text
    shown = leyden("show", "mine").text
    assert shown.count("interrupted") == 3 and "running" not in shown and "queued" not in shown
    assert "attempt 1: interrupted" in leyden("show", "mine", "sums.0").text
    with folder.lock():
        assert "interrupted" not in leyden("show", "mine").text


@pytest.mark.parametrize("command", [["runs"], ["show", "calc"]])
def test_a_home_folder_without_a_store_is_a_failure(leyden: Leyden, tmp_path: Path, command: list[str]) -> None:
    said = leyden(*command, "--home", tmp_path / "nowhere").mistake(1)
    assert f"no runs in {tmp_path / 'nowhere'}: `leyden train` writes them there; --home names another folder" in said
    assert "nowhere.db does not exist" in leyden(*command, "--store", tmp_path / "nowhere.db").mistake(1)
    assert not (tmp_path / "nowhere").exists()


def test_a_store_that_is_something_else_is_a_failure(leyden: Leyden, tmp_path: Path) -> None:
    (tmp_path / "leyden.db").write_text("a diary, not a database, and long enough to be taken for one" * 100)
    assert "left untouched" in leyden("runs", "--home", tmp_path).mistake(1)
    assert "not supported" in leyden("runs", "--store", "mysql://localhost/x").mistake(1)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "localhost", "127.0.0.1:8484", "http://", "ftp://x", "http://h:99999"]
)
def test_a_server_that_cannot_be_reached_is_a_failure(leyden: Leyden, url: str) -> None:
    assert "--server" in leyden("runs", "--server", url).mistake(1)


@pytest.fixture
def stranger() -> Iterator[str]:
    """A web server that is not Leyden's."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = 200 if self.path == "/api/runs" else 502
            self.send_response(status)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<h1>It works!</h1>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as page:
        threading.Thread(target=page.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{page.server_port}"
        page.shutdown()


def test_a_server_that_is_not_leydens_is_a_failure(leyden: Leyden, stranger: str) -> None:
    assert "Leyden" in leyden("runs", "--server", stranger).mistake(1)
    assert "It works!" in leyden("show", "calc", "--server", stranger).mistake(1)


def test_a_key_that_is_refused_is_a_failure(leyden: Leyden, filled: ServerProcess, tmp_path: Path) -> None:
    server = ("--server", filled.url)
    (tmp_path / "wrong.key").write_text("leyden-x.y\n")
    assert "not a key of this server" in leyden("runs", *server, "--key-file", "wrong.key").mistake(1)
    assert "expired" in leyden("runs", *server, "--key-file", filled.key_file(KeyKind.ADMIN, -1)).mistake(1)
    assert "missing.key: No such file" in leyden("runs", *server, "--key-file", "missing.key").mistake(1)
    assert "no key" in leyden("runs", *server).mistake(1)
    confined = filled.key_file(KeyKind.VIEWER, run="empty")
    assert "for run empty" in leyden("show", "calc", *server, "--key-file", confined).mistake(1)
    assert [run["id"] for run in leyden("runs", "--json", *server, "--key-file", confined).document] == ["empty"]


def test_no_option_of_a_command_is_a_key_which_other_users_could_read() -> None:
    (commands,) = (action.choices for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    options = [option for command in commands.values() for option in command._option_string_actions]
    assert "--key-file" in options and not [option for option in options if option.endswith("-key")]


def test_the_admin_key_of_the_home_folder_is_used_where_no_key_is_given(leyden: Leyden, filled: ServerProcess) -> None:
    found = leyden("runs", "--json", "--server", filled.url, "--home", filled.home).document
    assert [run["id"] for run in found] == ["calc", "empty"]


def test_a_timeout_within_a_command_is_not_called_an_unreachable_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def time_out(*_: object, **__: object) -> None:
        raise TimeoutError("the weights were not published in time")

    monkeypatch.setattr("leyden.local.train.train", time_out)
    (tmp_path / "one.toml").write_text('agent = "json:loads"\ntasks = "t"\nheld_out = 0\n')
    (tmp_path / "t").write_text("{}")
    with pytest.raises(TimeoutError, match="not published in time"):
        main(["train", str(tmp_path / "one.toml"), "--home", str(tmp_path)])


def test_a_training_that_is_stopped_at_once_says_how_to_resume(leyden: Leyden, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stopped(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("leyden.local.train.train", stopped)
    monkeypatch.setattr(os, "_exit", sys.exit)
    Path("my agents").mkdir()
    Path("my agents/one.toml").write_text('agent = "json:loads"\ntasks = "t"\nheld_out = 0\n')
    Path("my agents/t").write_text("{}")
    said = leyden("train", "my agents/one.toml", "training.steps=7", "--restart", "--home", "here")
    assert (said.status, said.out) == (130, "")
    assert said.err == (
        "tasks: 1 to train on, 0 held out; loading torch and spark\n"
        "leyden: stopped; continue with: leyden train 'my agents/one.toml' training.steps=7 --home here\n"
    )


# As a process


def command(*arguments: str, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "leyden", *arguments, "--home", str(home)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_serve_tells_a_person_where_it_is_and_stops_at_control_c(tmp_path: Path) -> None:
    with command("serve", "--port", "0", "--advertise", "http://here:1", home=tmp_path / "home") as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)
    said = "".join(lines)
    for fact in (
        "listens on http://127.0.0.1:",
        "#",
        "leyden.db",
        "admin.key",
        "Ctrl-C",
        "advertised as http://here:1",
    ):
        assert fact in said
    assert (process.returncode, complaint) == (0, "")


def test_a_reader_that_has_had_enough_is_no_failure(left: Path) -> None:
    with command("show", "calc", "sums.0", "--json", home=left) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        complaint = process.stderr.read()
    assert (process.returncode, complaint) == (0, "")


def test_a_misspelt_command_and_an_unknown_run_get_a_hint(
    leyden: Leyden, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong, hint in (("trian", "did you mean train?"), ("zzz", "the commands are train,")):
        with pytest.raises(SystemExit) as end:
            main([wrong])
        assert end.value.code == 2
        assert f"leyden: '{wrong}' is no command: {hint}" in capsys.readouterr().err
    for command in ("report", "top"):
        assert "no run 'nope': there are calc" in leyden(command, "nope", "--home", str(left)).mistake(1)


@pytest.mark.parametrize("every", ["0", "-1", "nan", "often"])
def test_an_interval_in_which_nothing_can_be_read_is_refused(every: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["top", f"--every={every}"])
    assert end.value.code == 2
    assert f"argument --every: write seconds from 0.1 to 3600, not '{every}'" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["serve", "--help"], ["runs", "--help"], ["show", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
    said = capsys.readouterr().out
    for name in ("serve", "runs", "show", "compare", "--json", "--home"):
        assert name in said


def test_a_full_disk_is_named_with_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("leyden.cli.cleaning.local_folder", full)
    assert main(["delete", "calc", "--home", str(tmp_path / "runs")]) == 1
    assert re.search(rf"No space left on device in {tmp_path}/runs, .* are left: free some", capsys.readouterr().err)
