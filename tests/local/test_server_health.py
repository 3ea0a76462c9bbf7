"""When a server that is alive counts as one that does not answer."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from leyden.local import server_process
from leyden.local.server_process import wait_unresponsive

LISTENING = """
import os, socket, time
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
{code}
"""
SILENT = "while True: pass"
DEADLOCKED = "time.sleep(600)"
ANSWERING = """
while True:
    connection, _ = listener.accept()
    connection.recv(1000)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 0\\r\\n\\r\\n")
    connection.close()
"""
CLOSING = """
while True:
    listener.accept()[0].close()
"""


@contextmanager
def process(code: str) -> Iterator[tuple[str, int]]:
    """A process that listens; gives its URL and id."""
    with subprocess.Popen([sys.executable, "-c", LISTENING.format(code=code)], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        yield f"http://127.0.0.1:{int(started.stdout.readline())}", started.pid
        started.kill()


@asynccontextmanager
async def waiting(url: str, pid: int) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(wait_unresponsive(url, pid))
    yield task
    task.cancel()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_INTERVAL_S", 0.05), ("_TIMEOUT_S", 0.2), ("_MAX_SILENT_S", 1.0)):
        monkeypatch.setattr(server_process, name, value)


@pytest.mark.parametrize("code", [SILENT, DEADLOCKED], ids=["computing", "deadlocked"])
async def test_a_server_that_does_not_answer_is_found(code: str) -> None:
    with process(code) as (url, pid):
        async with asyncio.timeout(60):
            await wait_unresponsive(url, pid)


@pytest.mark.parametrize("code", [ANSWERING, CLOSING], ids=["answering", "too many connections"])
async def test_a_server_that_answers_is_left_alone(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(server_process, "_TIMEOUT_S", 30.0)
    with process(code) as (url, pid):
        async with waiting(url, pid) as task:
            assert not (await asyncio.wait({task}, timeout=2))[0]


async def test_a_stopped_server_is_left_alone_until_it_runs_again_and_does_not_answer() -> None:
    with process(SILENT) as (url, pid):
        os.kill(pid, signal.SIGSTOP)
        async with waiting(url, pid) as task:
            assert not (await asyncio.wait({task}, timeout=2))[0]
            os.kill(pid, signal.SIGCONT)
            async with asyncio.timeout(60):
                await task


async def test_a_server_that_gets_no_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    starved = iter(range(10_000))
    monkeypatch.setattr(server_process, "_waited_s", lambda pid: float(next(starved)))
    with process(SILENT) as (url, pid):
        async with waiting(url, pid) as task:
            assert not (await asyncio.wait({task}, timeout=2))[0]
