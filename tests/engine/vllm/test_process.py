"""vLLM's server is restarted when it crashes, with the weights that `on_restart` sends, and not without end.

The server is a scripted one: a module `vllm` that answers health checks, takes a pause, and has a child of its own.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
from modelserving import eventually

from leyden.engine.protocol import EngineError
from leyden.engine.vllm import process as vllm_process
from leyden.engine.vllm.http import control, is_healthy
from leyden.engine.vllm.launch import VllmOptions
from leyden.engine.vllm.process import VllmProcess
from leyden.process import guardian

SERVER = """
import os, subprocess, sys, socket
subprocess.Popen(["sleep", "600"], start_new_session=True)
if "--fail" in sys.argv:
    sys.exit("ValueError: no memory is left")
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--uds") + 1])
listener.listen()
while True:
    connection, _ = listener.accept()
    request = connection.recv(1 << 16)
    print(request.split(b" ")[1].decode(), flush=True)
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\ncontent-type: application/json\\r\\n\\r\\n{}")
    connection.close()
"""

Create = Callable[..., VllmProcess]


@pytest.fixture
def create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Create:
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = '1.0'")
    (package / "api_server.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def create(on_restart: Callable[[], Awaitable[None]] | None = None, *arguments: str) -> VllmProcess:
        options = VllmOptions(tmp_path, sys.executable, arguments=arguments)
        return VllmProcess(options, tmp_path / "logs" / "vllm.log", on_restart)

    return create


def processes(server: VllmProcess) -> list[psutil.Process]:
    """The server and its child."""
    assert server.pid is not None
    found = psutil.Process(server.pid).children(recursive=True)
    return [each for each in found if each.name() != guardian.NAME]


async def test_a_crash_is_recovered_from_until_there_were_too_many(
    create: Create, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "_MAX_CRASHES", 2)
    sent = 0

    async def send_weights() -> None:
        nonlocal sent
        sent += 1

    server = create(send_weights)
    async with server, asyncio.timeout(120):
        assert not await server.recovered()
        family = processes(server)
        os.kill(family[0].pid, signal.SIGKILL)
        assert await server.recovered()
        assert (server.restarts, sent) == (1, 1) and not any(map(psutil.Process.is_running, family))
        async with control(server.location) as client:
            assert await is_healthy(client)
        log = tmp_path / "logs" / "vllm.log"  # to which a thread copies it
        await eventually(lambda: "/pause" in log.read_text())
        family = processes(server)
        os.kill(family[0].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"vLLM keeps dying: vLLM ended \(status -9\)"):
            await server.recovered()
        assert server.is_gone
    assert not any(map(psutil.Process.is_running, family)) and not server.socket.parent.exists()


async def test_a_server_that_cannot_start_says_why_and_leaves_nothing(create: Create) -> None:
    server = create(None, "--fail")
    with pytest.raises(EngineError, match=r"vLLM did not start \(status 1\): ValueError: no memory is left"):
        await server.start()
    await server.stop()
    assert server.pid is not None and not psutil.pid_exists(server.pid)


async def test_without_a_way_to_send_weights_a_crash_is_final(create: Create) -> None:
    async with create() as server, asyncio.timeout(120):
        os.kill(processes(server)[0].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=r"vLLM ended \(status -9\)"):
            await server.wait_failed()
