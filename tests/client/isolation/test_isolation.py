"""What agents can reach under each mode of isolation, with real sandboxes, user ids and gateways."""

import asyncio
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from isolating import IS_ROOT, module_path, needs_root, needs_sandbox, public_python
from modelserving import eventually
from worker_harness import AGENTS, WorkerHarness, hosts_of, in_sections

from leyden.client.isolation import user_ids
from leyden.client.isolation.options import IsolationOptions
from leyden.client.isolation.running import IsolationRequest, choose_mode, running_isolation
from leyden.client.isolation.sandbox import hosts_file, server_inside, targets
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.worker import isolation_request
from leyden.config.schema import WorkerConfig
from leyden.outcomes import Ending
from leyden.user_code.loading import LoadError


@contextmanager
def listening() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield listener.getsockname()[1]


async def found(harness: WorkerHarness, agent: str, task: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Run the spy on a task and return what it could do."""
    await harness.open(max_attempts=1)
    await harness.queue("g", task)
    with harness.worker(agent, **options):
        episode = await harness.episode("g")
    assert episode.attempt.outcome is not None
    result = episode.attempt.result
    assert isinstance(result, dict), (episode.attempt.outcome, episode.output)
    assert len(episode.calls) == 1 and result["answer"] == 1.0
    return result


def task_of(harness: WorkerHarness, tmp_path: Path, ports: list[int]) -> dict[str, Any]:
    secret = tmp_path / "home" / "admin.key"
    secret.parent.mkdir()
    secret.write_text("secret")
    return {
        "read": [str(secret), "/etc/passwd"],
        "write": [str(AGENTS), str(tmp_path)],
        "connect": ports,
        "signal": [os.getpid()],
        "variables": ["HF_TOKEN", "INDEX"],
        "reversed": "a-token-of-a-hub"[::-1],  # the task is a variable too
    }


@needs_sandbox
@pytest.mark.parametrize("agent", ["spying.py:spy", f"{sys.executable} spying.py"])
async def test_a_sandbox_shows_the_agents_folder_and_the_gateway_and_nothing_else(
    harness: WorkerHarness, tmp_path: Path, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-token-of-a-hub")
    monkeypatch.setenv("INDEX", "named")
    with listening() as allowed, listening() as other:
        task = task_of(harness, tmp_path, [allowed, other])
        options = {"network": (f"127.0.0.1:{allowed}",), "environment": ("INDEX",)}
        did = await found(harness, agent, task, isolation="sandbox", **options)
    assert did["read"] == ["/etc/passwd"]
    assert did["wrote"] == [] and did["scratch"]
    assert did["connected"] == [allowed]
    assert did["signalled"] == []
    assert did["variables"] == ["INDEX"] and did["leaked"] == []
    assert did["user"] != 0


@needs_sandbox
@pytest.mark.parametrize("memory_mb", [400, None])
async def test_a_host_in_a_sandbox_has_limits_of_memory_and_processes(
    harness: WorkerHarness, memory_mb: int | None
) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("within", {"mb": 10})
    await harness.queue("beyond", {"mb": 1 << 20})
    options = {"isolation": "sandbox", "memory_mb": memory_mb, "concurrency": 2}
    with harness.worker("hoarding.py:act", **options):
        beyond, within = await harness.episode("beyond"), await harness.episode("within")
    limit = memory_mb or psutil.virtual_memory().total // 2 >> 20
    stack_mb = resource.getrlimit(resource.RLIMIT_STACK)[0] >> 20
    assert within.attempt.result == {"took": 10, "processes": 4096, "memory_mb": limit + 2 * stack_mb}
    assert beyond.attempt.outcome is not None and beyond.attempt.outcome.ending is Ending.AGENT_ERROR
    assert f"needed more than {limit} MB of memory (`memory_mb`)" in beyond.attempt.outcome.message


@needs_sandbox
async def test_a_command_in_a_sandbox_has_limits_of_memory_and_cpu(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("memory", {"do": "memory of children", "mb": 200, "n": 3})
    await harness.queue("cpu", {"do": "burn"})
    with harness.worker(f"{sys.executable} command.py", isolation="sandbox", memory_mb=300, cpu_s=1.0):
        outcomes = [(await harness.episode(name)).attempt.outcome for name in ("memory", "cpu")]
    memory, cpu = [outcome.message for outcome in outcomes if outcome is not None]
    assert "its processes together held more than 300 MB of memory (`memory_mb`)" in memory
    assert "it used more than 1 s of CPU time (`cpu_s`)" in cpu


@needs_sandbox
async def test_the_forwarder_of_sandboxes_ends_with_a_worker_that_fails() -> None:
    options = WorkerOptions(
        server="http://127.0.0.1:9",
        agent="spying.py:spy",
        base=str(AGENTS),
        name="w",
        workers=WorkerConfig(isolation="sandbox"),
    )
    with pytest.raises(LoadError):
        async with running_isolation(isolation_request(options)):
            raise LoadError("the reward function cannot be loaded")
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_without_isolation_an_agent_can_do_what_its_user_can(harness: WorkerHarness, tmp_path: Path) -> None:
    with listening() as port:
        task = task_of(harness, tmp_path, [port])
        task["write"] = [str(tmp_path)]
        did = await found(harness, "spying.py:spy", task)
    assert (did["read"], did["wrote"], did["connected"], did["signalled"]) == (
        task["read"],
        task["write"],
        task["connect"],
        task["signal"],
    )


SHELL_SPY = """#!/bin/sh
read task
curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
  -H "Content-Type: application/json" -d '{"model": "any", "messages": [{"role": "user", "content": "number 7"}]}' \\
  > "$TMPDIR/answer" || exit 7
cat "$SECRET" && exit 8
kill -CONT $PPID && exit 9
touch "$HERE/mark" && exit 10
echo "{\\"result\\": {\\"user\\": $(id -u), \\"home\\": \\"$HOME\\"}, \\"reward\\": 1}"
"""


def scratch_folders(user: str = "") -> list[Path]:
    """Scratch folders that exist now."""
    return list(Path(tempfile.gettempdir()).glob(f"leyden-agent-{user}*"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read, with a shell spy and a secret that only this user can read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file, text, mode in (("admin.key", "secret", 0o600), ("spy.sh", SHELL_SPY, 0o755)):
            (folder / file).write_text(text)
            (folder / file).chmod(mode)
        yield folder


@needs_root
async def test_commands_have_user_ids_of_their_own_that_cannot_read_the_run(
    harness: WorkerHarness, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", str(open_folder / "admin.key"))
    monkeypatch.setenv("HERE", str(open_folder))
    await harness.open(max_attempts=1)
    await harness.queue("g", {}, size=3)
    options = {"isolation": "user", "environment": ("SECRET", "HERE"), "concurrency": 2}
    with harness.worker("./spy.sh", base=str(open_folder), **options):
        episodes = await harness.episodes("g")
        homes = {episode.attempt.result["home"] for episode in episodes if isinstance(episode.attempt.result, dict)}
        await eventually(lambda: not set(map(str, scratch_folders())) & homes)
    results = [episode.attempt.result for episode in episodes]
    assert all(isinstance(result, dict) for result in results), [e.attempt.outcome for e in episodes]
    assert [episode.final_reward(0.0) for episode in episodes] == [1.0] * 3
    assert all(result["user"] >= user_ids.FIRST for result in results)


KEEPING = """#!/bin/sh
read task
echo "a note" > "$HOME/note"
echo "{\\"result\\": \\"$HOME\\", \\"reward\\": 1}"
"""
SLOW_RM = """#!/bin/sh
while [ ! -e "$MAY_REMOVE" ]; do sleep 0.05; done
exec /bin/rm "$@"
"""


@needs_root
async def test_commands_run_while_the_scratch_folder_of_an_earlier_one_is_removed(
    harness: WorkerHarness, open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, name, text in ((open_folder, "keep.sh", KEEPING), (tmp_path, "rm", SLOW_RM)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("MAY_REMOVE", str(tmp_path / "go"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    await harness.open(max_attempts=1)
    with harness.worker("./keep.sh", base=str(open_folder), isolation="user", concurrency=1):
        homes = []
        for group in ("first", "second"):
            await harness.queue(group, {})
            homes.append(Path((await harness.episode(group)).attempt.result))
        assert all(home.exists() for home in homes) and homes[0].name.split("-")[2] != homes[1].name.split("-")[2]
        (tmp_path / "go").touch()
        await eventually(lambda: not any(home.exists() for home in homes))


@needs_root
async def test_hosts_have_user_ids_of_their_own_that_cannot_read_the_run(
    harness: WorkerHarness, open_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("spying.py", "plain.py"):
        shutil.copy(AGENTS / name, open_folder)
    monkeypatch.setattr(sys, "executable", public_python(open_folder))
    monkeypatch.setenv("PYTHONPATH", module_path())
    monkeypatch.setenv("HF_TOKEN", "a-token-of-a-hub")
    options = {"base": str(open_folder), "isolation": "user", "concurrency": 4, "processes": 2}
    await harness.open(max_attempts=1)
    with listening() as port, harness.worker("spying.py:spy", **options) as worker:
        await harness.queue("first", {}, size=4)
        await harness.episodes("first")  # the worker runs attempts: its hosts stay
        pids: dict[int, int] = {}

        def have_started() -> bool:
            pids.clear()
            pids.update({user: host.pid for host in hosts_of(worker) if (user := user_of(host)) >= user_ids.FIRST})
            return len(pids) == 2

        await eventually(have_started)
        scratch = {user: str(folder) for user in pids for folder in scratch_folders(f"{user}-")}
        task = {
            "read": [str(open_folder / "admin.key"), f"/proc/{worker.process.pid}/environ", "/etc/passwd"],
            "write": [str(open_folder), str(tmp_path), *(scratch[user] for user in sorted(pids))],
            "connect": [port],
            "variables": ["HF_TOKEN"],
            "signal": [os.getpid(), worker.process.pid, *(host.pid for host in hosts_of(worker))],
        }
        await harness.queue("g", task, size=8)
        episodes = await harness.episodes("g")
    for episode in episodes:
        did = episode.attempt.result
        assert isinstance(did, dict), (episode.attempt.outcome, episode.output)
        assert did["answer"] == 1.0 and len(episode.calls) == 1
        assert did["user"] in pids
        assert did["read"] == ["/etc/passwd"]
        assert did["wrote"] == [scratch[did["user"]]] and did["scratch"]
        assert did["connected"] == [port]  # the network is the machine's
        assert did["signalled"] == [pids[did["user"]]]  # only itself
        assert did["environment"] == 1 and did["variables"] == []


def user_of(process: psutil.Process) -> int:
    try:
        return process.uids().real
    except psutil.Error:
        return -1


@pytest.fixture
def range_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """User ids that no other test allocates meanwhile."""
    monkeypatch.setattr(user_ids, "FIRST", user_ids.LAST - 99)


@needs_root
@pytest.mark.usefixtures("range_of_its_own")
def test_no_two_processes_have_the_same_user_id() -> None:
    users = [user_ids.allocate_user() for _ in range(3)]
    try:
        assert len({each.id for each in users}) == 3
        assert all(each.scratch.stat().st_uid == each.id and each.scratch.stat().st_mode & 0o77 == 0 for each in users)
    finally:
        for each in users:
            each.release()
    again = user_ids.allocate_user()
    again.release()
    assert again.id == users[0].id and not again.scratch.exists()


@needs_root
@pytest.mark.usefixtures("range_of_its_own")
def test_a_user_id_finds_no_files_of_its_last_user_whose_worker_was_killed() -> None:
    killed = user_ids.allocate_user()
    (killed.scratch / "notes").write_text("secret")
    os.close(killed.lock)  # as the kernel does when a process dies
    again = user_ids.allocate_user()
    try:
        assert again.id == killed.id
        assert not killed.scratch.exists() and again.scratch.exists()
    finally:
        again.release()


@needs_root
@pytest.mark.usefixtures("range_of_its_own")
async def test_a_worker_that_starts_removes_the_scratch_folders_of_killed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(tmp_path, 0o711)  # noqa: PTH101 - ASYNC240 refuses the method
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    users = [user_ids.allocate_user() for _ in range(3)]
    used, killed, highest = users
    (tmp_path / "leyden-agent-notes-of-somebody").mkdir()
    for each in (killed, highest):
        os.close(each.lock)  # as the kernel does when a process dies
    try:
        async with running_isolation(request("user")):
            assert used.scratch.exists() and not killed.scratch.exists() and not highest.scratch.exists()
            assert (tmp_path / "leyden-agent-notes-of-somebody").exists()
    finally:
        used.release()


def request(choice: Any, **options: Any) -> IsolationRequest:
    fields = {"server": "http://127.0.0.1:1", "base": str(AGENTS), **options}
    return IsolationRequest(
        choice=choice, probe=("true",), agent="x", options=IsolationOptions(**in_sections(**fields))
    )


@needs_sandbox
def test_auto_takes_the_strongest_mode_that_works_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_mode(request("auto")) == (
        "sandbox",
        "agents run in sandboxes without your files and your network (workers.isolation = sandbox)",
    )
    monkeypatch.setattr(shutil, "which", lambda name: None)
    mode, note = choose_mode(request("auto"))
    assert mode == ("user" if IS_ROOT else "none")
    assert "\n" not in note
    with pytest.raises(LoadError, match=r'`workers.isolation = "sandbox"` does not work here: .* install bubblewrap'):
        choose_mode(request("sandbox"))


@pytest.mark.parametrize("choice", ["auto", "user"])
def test_keys_that_every_user_can_read_are_an_error_where_agents_are_other_users(
    tmp_path: Path, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)  # without bubblewrap, `auto` tries `user`
    key = tmp_path / "worker.key"
    key.write_text("leyden-of-the-worker")
    key.chmod(0o644)
    for options in ({"hidden": (str(key),)}, {"base": str(tmp_path)}):
        with pytest.raises(LoadError, match=r"every user can read the key in .*worker.key: chmod 600"):
            choose_mode(request(choice, **options))
        assert choose_mode(request("none", **options))[0] == "none"
    key.chmod(0o600)
    assert choose_mode(request("auto", hidden=(str(key),)))[0] == ("user" if IS_ROOT else "none")


@needs_sandbox
def test_the_modules_of_a_worker_are_not_found_in_place_of_a_users() -> None:
    probe = "import sys; before = [*sys.path]; import leyden.client.isolation.sandbox; print(sys.path == before)"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True).stdout == b"True\n"


def test_a_sandbox_never_shows_the_home_folder() -> None:
    with pytest.raises(LoadError, match="move the agent into a folder of its own"):
        choose_mode(request("sandbox", base=str(Path.home())))


@needs_sandbox
async def test_the_folder_of_runs_is_empty_in_a_sandbox(harness: WorkerHarness, tmp_path: Path) -> None:
    shutil.copytree(AGENTS, tmp_path / "agents")
    secret = tmp_path / "agents" / "runs" / "mine" / "admin.key"
    secret.parent.mkdir(parents=True)
    secret.write_text("secret")
    task = {"read": [str(secret)], "write": [str(secret.parent.parent)]}
    options = {"base": str(tmp_path / "agents"), "hidden": (str(secret.parent.parent),)}
    did = await found(harness, "spying.py:spy", task, isolation="sandbox", **options)
    assert (did["read"], did["wrote"]) == ([], [])


def test_names_and_addresses_of_a_sandbox_lead_to_its_forwarder() -> None:
    options = IsolationOptions(
        server="http://10.1.2.3:8484", workers=WorkerConfig(network=("db.example:5432", "localhost:6379", "[::1]:80"))
    )
    assert targets(options) == ["10.1.2.3:8484", "db.example:5432", "localhost:6379", "[::1]:80"]
    assert server_inside(options) == "http://leyden-10-1-2-3:8484"
    assert hosts_file(options) == "127.0.0.1 localhost\n127.0.1.1 leyden-10-1-2-3\n127.0.1.2 db.example\n"
    assert server_inside(IsolationOptions(server="https://train.example")) == "https://train.example"
    assert targets(IsolationOptions(server="http://a:1", workers=WorkerConfig(network=("*",)))) == []
