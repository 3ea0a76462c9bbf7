"""Starting and stopping a server: what it refuses to start with, what it says of itself, and how it ends."""

import asyncio
import contextlib
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from pathlib import Path

import aiohttp
import pytest
from databases import Postgres
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine
from serving import ServerProcess, delete_store

from leyden.api.client import Remote, RemoteError, ServerUnreachable
from leyden.api.wire import EventCursor, EventLog, GroupSpec, LeaseRequest, RunSpec
from leyden.cli import main
from leyden.records import Call, CallStatus, RunSettings, Task, Version
from leyden.rendering.factory import renderer_for
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.control.keys import KeyKind
from leyden.server.gateway.calls.scheduler import Scheduler
from leyden.server.gateway.served_model import ServedModel
from leyden.server.options import ServeOptions
from leyden.server.serve import open_server
from leyden.store.database import Database
from leyden.store.errors import StoreLost
from leyden.store.files import ownership
from leyden.store.read import queries

Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """What a server says that does not start: one line, and exit status 1."""

    def start(home: Path, *arguments: str) -> str:
        assert main(["serve", "--home", str(home), "--port", "0", *arguments]) == 1
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1), said.err
        assert said.err.startswith("leyden: ")
        return said.err

    return start


async def work(remote: Remote, run: str, size: int = 1) -> None:
    await remote.create_run(RunSpec(run, RunSettings(lease_s=3600)))
    await remote.enqueue(run, GroupSpec(f"{run}-g", Task("t", None), size=size))


async def numbers(server: ServerProcess) -> dict[str, float]:
    """The samples of /metrics, by name, each summed over its labels."""
    headers = {"authorization": f"Bearer {server.admin_key}"}
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics", headers=headers) as reply:
        page = await reply.text()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_the_key_of_the_upstream_is_in_an_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ServeOptions] = []

    async def serve(options: ServeOptions, _: object) -> None:
        given.append(options)

    monkeypatch.setattr("leyden.server.serve.serve", serve)
    monkeypatch.setenv("LEYDEN_UPSTREAM_KEY", "secret")
    assert main(["serve", "--home", str(tmp_path), "--upstream", "http://host/v1"]) == 0
    assert [(options.upstream.url, options.upstream_key) for options in given] == [("http://host/v1", "secret")]


# What it refuses to start with


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com", ""])
def test_an_address_that_others_reach_is_refused_without_keys(tmp_path: Path, host: str, refusal: Refusal) -> None:
    assert "--keyless" in refusal(tmp_path, "--keyless", "--host", host)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", [(), ("--model", "no/such/model")])
def test_a_port_that_is_taken_is_refused_before_a_model_is_looked_for(
    tmp_path: Path, refusal: Refusal, model: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refusal(tmp_path, "--port", port, *model)
    assert port in said and "--port" in said


def test_a_second_server_on_the_same_home_is_refused(server: ServerProcess, refusal: Refusal) -> None:
    assert f"in use by another server at {server.url}: stop that one" in refusal(server.home)


def test_a_second_server_on_the_same_postgresql_is_refused_until_the_first_is_killed(
    tmp_path: Path, postgres: Postgres | None, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    if postgres is None:
        pytest.skip("no PostgreSQL server on this machine")
    monkeypatch.setattr(ownership, "_WAIT_S", 1)
    database = postgres.new_database()
    with ServerProcess(tmp_path / "first", "--store", database) as first:
        assert "in use by another server" in refusal(tmp_path / "second", "--store", database)
        first.kill()
        first.start()


def test_a_home_that_is_a_file_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refusal(tmp_path / "file")


@pytest.mark.parametrize("secret", ["", "no secret"])
def test_a_damaged_secret_is_refused(tmp_path: Path, secret: str, refusal: Refusal) -> None:
    (tmp_path / "secret").write_text(secret)
    assert str(tmp_path / "secret") in refusal(tmp_path)


# What it says of itself


def test_the_secret_and_the_admin_key_are_for_their_owner_alone(server: ServerProcess) -> None:
    for name in ("secret", "admin.key"):
        assert stat.S_IMODE((server.home / name).stat().st_mode) == 0o600
    assert Path(server.running.admin_key_file) == server.home / "admin.key"


async def test_health_needs_no_key(server: ServerProcess) -> None:
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/healthz") as reply:
        assert (reply.status, await reply.json()) == (200, {"status": "ok"})


async def test_metrics_count_what_happens(server: ServerProcess, remote: Remote) -> None:
    before = await numbers(server)
    await work(remote, "counted", size=2)
    first, _ = await remote.lease(LeaseRequest("w", 2, run="counted"))
    await remote.cancel_rollout("counted", first.attempt.rollout)
    after = await numbers(server)
    assert after["leyden_leases"] == before["leyden_leases"] + 1
    assert after["leyden_attempts_ended_total"] == before.get("leyden_attempts_ended_total", 0) + 1
    assert after["leyden_requests_total"] >= before.get("leyden_requests_total", 0) + 4
    assert after["leyden_store_operations_total"] >= before["leyden_store_operations_total"] + 4
    assert after["leyden_store_bytes"] > 0


async def test_an_agent_receives_the_advertised_address(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--advertise", "https://leyden.example:8443") as server:
        assert server.running.advertised == "https://leyden.example:8443"
        async with Remote(server.url, server.admin_key) as remote:
            await work(remote, "r")
            (lease,) = await remote.lease(LeaseRequest("w"))
            assert lease.url == "https://leyden.example:8443"


async def test_an_agent_receives_the_address_that_the_server_listens_on(server: ServerProcess, remote: Remote) -> None:
    await work(remote, "told")
    (lease,) = await remote.lease(LeaseRequest("w", run="told"))
    assert lease.url == server.url
    version, trace_id, _, flags = lease.traceparent.split("-")
    assert (version, trace_id, flags) == ("00", lease.attempt.trace_id, "01")


async def test_without_keys_everybody_may_and_a_key_is_still_held_to_its_scope(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "--keyless") as server:
        async with Remote(server.url) as anybody:
            await work(anybody, "r")
            (lease,) = await anybody.lease(LeaseRequest("w"))
            await anybody.record_calls("r", lease.attempt.id, [Call("c")])
        for key, status in ((lease.key, 403), (server.key(KeyKind.VIEWER, run="other"), 403), ("leyden-no.key", 401)):
            async with Remote(server.url, key) as confined:
                with pytest.raises(RemoteError) as refused:
                    await confined.get_run("r")
                assert refused.value.status == status


# Waiting


@pytest.fixture
async def patient(server: ServerProcess) -> AsyncIterator[Remote]:
    """A second connection, for waiting."""
    async with Remote(server.url, server.admin_key) as connection:
        yield connection


async def until_asked_for_work(remote: Remote, worker: str) -> None:
    """Return when the server has heard of a worker: it has looked for work for it, and lets it wait."""
    while worker not in {known.id for known in await remote.list_workers()}:
        pass


class HalfSent:
    """A request to create a run whose body comes in two pieces."""

    def __init__(self, server: ServerProcess, run: str) -> None:
        self._server, self._run = server, run

    async def begin(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", int(self._server.port))
        body = b'{"id": "%s"}' % self._run.encode()
        head = (
            f"POST /api/runs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._server.admin_key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body[:5])
        await self._writer.drain()
        self._rest = body[5:]

    async def end(self) -> bytes:
        """The status line of the answer."""
        self._writer.write(self._rest)
        line = await self._reader.readline()
        self._writer.close()
        return line.strip()


async def until_it_takes_no_more(server: ServerProcess) -> None:
    """Return when nobody can connect any longer."""
    with contextlib.suppress(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection("127.0.0.1", int(server.port))
            writer.close()


async def test_a_wait_for_events_ends_with_the_next_event(remote: Remote, patient: Remote) -> None:
    await remote.create_run(RunSpec("news"))
    seen = (await remote.follow_events("news", EventCursor())).after
    waiting = asyncio.create_task(patient.follow_events("news", EventCursor(after=seen, wait=60, kind="group.queued")))
    await remote.publish_version("news", Version("policy", 1))
    await remote.enqueue("news", GroupSpec("news-g", Task("t", None)))
    log = await asyncio.wait_for(waiting, 30)
    assert [(event.kind, event.subject) for event in log.events] == [("group.queued", "news-g")]
    assert log.after == log.events[-1].seq


async def test_a_wait_for_work_ends_when_there_is_some(remote: Remote, patient: Remote) -> None:
    await remote.create_run(RunSpec("queue"))
    waiting = asyncio.create_task(patient.lease(LeaseRequest("w", run="queue", wait=60)))
    await remote.enqueue("queue", GroupSpec("queue-g", Task("t", None)))
    (lease,) = await asyncio.wait_for(waiting, 30)
    assert lease.attempt.rollout == "queue-g.0"


async def test_a_wait_is_over_in_its_time(remote: Remote) -> None:
    await remote.create_run(RunSpec("quiet"))
    seen = (await remote.follow_events("quiet", EventCursor())).after
    assert await remote.follow_events("quiet", EventCursor(after=seen, wait=0.05)) == EventLog((), seen)
    assert await remote.lease(LeaseRequest("w", run="quiet", wait=0.05)) == []


async def test_a_worker_that_hangs_up_takes_no_work_with_it(remote: Remote, server: ServerProcess) -> None:
    await remote.create_run(RunSpec("hung-up"))
    leaving = Remote(server.url, server.admin_key)
    await leaving.__aenter__()
    waiting = asyncio.create_task(leaving.lease(LeaseRequest("gone", run="hung-up", wait=60)))
    await until_asked_for_work(remote, "gone")
    waiting.cancel()
    await asyncio.wait([waiting])
    await leaving.__aexit__()
    await remote.enqueue("hung-up", GroupSpec("hung-up-g", Task("t", None)))
    (lease,) = await remote.lease(LeaseRequest("here", run="hung-up", wait=30))
    assert (lease.attempt.worker, lease.attempt.number) == ("here", 1)


# Stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_server_that_stops_lets_go_who_waits_and_finishes_what_it_began(
    tmp_path: Path, number: signal.Signals
) -> None:
    with ServerProcess(tmp_path) as server:
        async with Remote(server.url, server.admin_key) as remote:
            await remote.create_run(RunSpec("r"))
            seen = (await remote.follow_events("r", EventCursor())).after
            for_work = asyncio.create_task(remote.lease(LeaseRequest("w", wait=300)))
            for_news = asyncio.create_task(remote.follow_events("r", EventCursor(after=seen, wait=300)))
            begun = HalfSent(server, "begun")
            await begun.begin()
            await until_asked_for_work(remote, "w")

            server.process.send_signal(number)
            assert await asyncio.wait_for(for_work, 60) == []
            assert await asyncio.wait_for(for_news, 60) == EventLog((), seen)
            await until_it_takes_no_more(server)
            assert server.process.poll() is None
            assert await begun.end() == b"HTTP/1.1 200 OK"
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        server.start()
        async with Remote(server.url, server.admin_key) as remote:
            assert [run.id for run in await remote.list_runs()] == ["r", "begun"]


async def test_a_worker_that_polls_again_at_once_does_not_keep_a_server_from_stopping(tmp_path: Path) -> None:
    async def ask_again_and_again(remote: Remote) -> None:
        with contextlib.suppress(ConnectionError, RemoteError):
            while True:
                await remote.lease(LeaseRequest("w", wait=300))

    with ServerProcess(tmp_path) as server:
        async with Remote(server.url, server.admin_key) as remote:
            asking = asyncio.create_task(ask_again_and_again(remote))
            await until_asked_for_work(remote, "w")
            server.process.terminate()
            await asyncio.wait([asking], timeout=60)
            assert asking.done()
            assert await asyncio.to_thread(server.process.wait, 60) == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "https://evil.example"}, 401),
        ({"origin": "http://[evil"}, 401),
        ({"host": "[evil"}, 401),
        ({"host": "evil.example"}, 401),  # a name of its own that a page made point here
    ],
)
async def test_keyless_is_for_this_machine_and_not_for_pages_of_other_sites(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    with ServerProcess(tmp_path, "--keyless") as server:
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/api/runs", headers=headers) as reply:
            assert reply.status == status


async def test_headers_that_do_not_end_are_hung_up_on(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nendless: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"x" * 65_536)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            assert (await reader.read(100)).startswith(b"HTTP/1.1 400")
        writer.close()


def test_an_admin_key_file_that_is_no_text_is_written_again(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server:
        assert server.stop() == 0
    (tmp_path / "admin.key").write_bytes(b"\xff\x00\xfe")
    command = [sys.executable, "-m", "leyden", "runs", "--home", str(tmp_path), "--server", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "is not the file of a key" in done.stderr and "Traceback" not in done.stderr
    with ServerProcess(tmp_path) as server:
        assert server.admin_key.startswith("leyden-")


@pytest.mark.parametrize("signals", [1, 2])
async def test_calls_that_a_stopping_server_cuts_off_are_recorded(
    signals: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.server.serve._SHUTDOWN_S", 1)
    tokenizer = Tokenizer.load(str(files("leyden") / "models" / "spark"))
    engine = ScriptedEngine(lambda _: tokenizer.encode("a long answer " * 50), chunk_tokens=1, delay_s=10.0)
    model = ServedModel("spark", engine, renderer_for(tokenizer), tokenizer, Scheduler())
    body = {"model": "spark", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    async with (
        asyncio.timeout(60),
        aiohttp.ClientSession() as session,
        open_server(ServeOptions(tmp_path), [model]) as server,
    ):
        store, keyring = server.service.store, server.service.keyring
        await store.create_run(RunSpec("r", RunSettings()))
        await store.enqueue("r", GroupSpec("g", Task("t", {})))
        (grant,) = await store.lease(LeaseRequest("w", run="r"))
        scope = {"run": "r", "rollout": grant.attempt.rollout, "attempt": grant.attempt.id}
        key = keyring.create(KeyKind.ATTEMPT, 3600, started=grant.attempt.started, **scope)[0]
        headers = {"authorization": f"Bearer {key}"}
        reply = await session.post(f"{server.running.url}/v1/chat/completions", json=body, headers=headers)
        await reply.content.readline()
        for _ in range(signals):
            server.stop()
        await server.stopped  # after its time limit, or at once
    database = Database(tmp_path / "leyden.db", readonly=True)
    with database.reader.begin() as look:
        (call,) = queries.get_episode(look, "r", grant.attempt.id).calls
    database.close()
    assert call.status is CallStatus.ABANDONED
    assert not [record for record in caplog.records if record.exc_info]
    assert any("cut off" in message or "Cancel 1 running task" in message for message in caplog.messages)


async def test_a_server_whose_store_is_deleted_acknowledges_nothing_more_and_ends(tmp_path: Path) -> None:
    with pytest.raises(StoreLost, match=r"leyden\.db is gone"):
        async with open_server(ServeOptions(tmp_path)) as server:
            async with Remote(server.running.url, (tmp_path / "admin.key").read_text().strip()) as remote:
                await work(remote, "r")
                cursor = EventCursor(after=1000, wait=60)
                waiting = asyncio.create_task(remote.follow_events("r", cursor))  # it does not delay the end
                delete_store(tmp_path)
                with pytest.raises((RemoteError, ServerUnreachable)):
                    await remote.create_run(RunSpec("second"))
                await server.stopped
            await asyncio.wait({waiting})
