"""A child process on another machine behaves as one of this machine; nobody without the host's key has one."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
from msgspec.structs import replace

from leyden.process import place as place_module
from leyden.process.child import ChildProcess
from leyden.process.guardian import Guard
from leyden.process.host import ProcessHost
from leyden.process.place import FindMissing, PlaceLost, RemotePlace
from leyden.process.rotating_log import RotatingLog

TIMEOUT_S = 60.0


@pytest.fixture
async def place() -> AsyncIterator[RemotePlace]:
    host = ProcessHost()
    yield await host.open("127.0.0.1", "node 7")
    host.close()


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


async def test_streams_environment_and_status_are_those_of_the_process(place: RemotePlace, tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "log")
    code = (
        "import os, sys; print('ready', os.environ['ADDED'], flush=True); "
        "sys.stderr.write('heard ' + sys.stdin.readline()); sys.stdin.read(); sys.exit(7)"
    )
    child = ChildProcess(
        python(code), environment={**os.environ, "ADDED": "1"}, stdout=PIPE, log=log, grace_s=TIMEOUT_S, place=place
    )
    assert await child.first_line() == b"ready 1\n"
    child.send(b"hello\n")
    assert await child.end() == 7
    assert log.last_line() == "heard hello"


async def test_sockets_that_it_inherits_and_those_that_it_listens_on_are_relayed(
    place: RemotePlace, tmp_path: Path
) -> None:
    ours, theirs = socket.socketpair()
    code = (
        "import socket, sys; path, fd = sys.argv[1:]; listening = socket.socket(socket.AF_UNIX); listening.bind(path); "
        "listening.listen(); end = socket.socket(fileno=int(fd)); end.sendall(end.recv(9).upper()); "
        "client = listening.accept()[0]; client.close(); client = listening.accept()[0]; "
        "client.sendall(client.recv(9)[::-1]); sys.stdin.read()"
    )
    here = tmp_path / "socket"
    child = ChildProcess(
        python(code, place.path(here), theirs.fileno()), pass_fds=[theirs.fileno()], place=place, listens=[here]
    )
    theirs.close()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    writer.write(b"abc")
    async with asyncio.timeout(TIMEOUT_S):
        assert await reader.read(9) == b"ABC"
        while not here.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_unix_connection(here)
        writer.write(b"abc")
        assert await reader.read(9) == b"cba"
    await child.end()


@pytest.mark.parametrize("guard", [None, Guard()])
async def test_a_killed_child_is_killed_there(place: RemotePlace, guard: Guard | None) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    child = ChildProcess(python(code), stdout=PIPE, place=place, guard=guard)
    there = psutil.Process(int(await child.first_line()))
    child.kill()
    await child.wait()
    with suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(there.wait, TIMEOUT_S)


async def test_it_ends_by_the_signal_that_ended_the_process(place: RemotePlace) -> None:
    child = ChildProcess(python("import os; os.kill(os.getpid(), 9)"), place=place)
    assert await child.wait() == -signal.SIGKILL


async def test_what_cannot_be_started_and_a_host_that_is_gone_say_so(place: RemotePlace, tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "log")
    assert await ChildProcess(["/no/such/program"], place=place, log=log).wait() == 127
    assert log.last_line() == "/no/such/program cannot be started on this node: No such file or directory"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = replace(place, port=taken.getsockname()[1])
    assert await ChildProcess(python(""), place=gone, log=log).wait() == 1
    assert log.last_line() == "node 7 is lost"
    with pytest.raises(PlaceLost, match="node 7 is lost"):
        await gone.deliver(tmp_path, "weights")


async def test_a_process_that_cannot_be_reached_by_its_socket_is_ended(place: RemotePlace, tmp_path: Path) -> None:
    code = (
        "import os, socket, sys; listening = socket.socket(socket.AF_UNIX); listening.bind(sys.argv[1]); "
        "listening.listen(); print(os.getpid(), flush=True); sys.stdin.read()"
    )
    here, log = tmp_path / "no such folder" / "socket", RotatingLog(tmp_path / "log")
    child = ChildProcess(python(code, place.path(here)), stdout=PIPE, log=log, place=place, listens=[here])
    pid = int(await child.first_line())
    async with asyncio.timeout(TIMEOUT_S):
        assert await child.wait() == 1
    assert log.last_line() == "node 7 is lost"
    with suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.Process(pid).wait, TIMEOUT_S)


async def test_a_host_that_does_not_answer_is_not_waited_for(
    place: RemotePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "_ANSWER_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stopped = replace(place, port=silent.getsockname()[1])
        with pytest.raises(PlaceLost, match="node 7 is lost"):
            await stopped.missing([Path("/")])


async def test_without_the_key_nothing_is_answered(place: RemotePlace) -> None:
    assert await place.missing([Path("/"), Path("/no/such")]) == ["/no/such"]
    for key in ("", "0" * 64, "0" * 65):
        reader, _ = await replace(place, key=key).connect(FindMissing(["/"]))
        async with asyncio.timeout(TIMEOUT_S):
            with suppress(ConnectionError):
                assert await reader.read() == b""


async def test_a_delivered_folder_replaces_the_one_before(place: RemotePlace, tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a").write_bytes(name.encode() * 300_000)
        (folder / "b").write_bytes(b"")
        there = await place.deliver(folder, "weights")
        assert contents(Path(place.folder)) == {f"{there}/a": name.encode() * 300_000, f"{there}/b": b""}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
