"""Child processes end when their standard input closes, or are killed; guarded ones with all their descendants."""

import asyncio
import gc
import signal
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT

import psutil
import pytest

from leyden.process.child import ChildProcess
from leyden.process.guardian import Guard
from leyden.process.rotating_log import RotatingLog

ECHO = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)\nsys.exit(3)"
DEAF = "import time; print('up', flush=True); time.sleep(600)"
DAEMON = """
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    os.execv("/bin/sleep", ["sleep", "600"])
time.sleep(600)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def test_a_child_answers_and_ends_in_its_own_time_when_its_input_closes() -> None:
    child = ChildProcess(python(ECHO), stdout=PIPE, grace_s=60.0)
    child.send(b"hello\n")
    assert await child.first_line() == b"HELLO\n"
    assert child.status is None
    assert await child.end() == child.status == await child.wait() == 3
    child.send(b"it has ended\n")


async def test_a_child_that_does_not_end_in_its_grace_time_is_killed() -> None:
    child = ChildProcess(python(DEAF), stdout=PIPE)
    assert await child.first_line() == b"up\n"
    assert await child.end() == -signal.SIGKILL


async def test_a_child_ends_when_nobody_holds_it() -> None:
    child = ChildProcess(python(ECHO), stdout=DEVNULL)
    process = child.process
    waiting = asyncio.ensure_future(child.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    del child, waiting
    gc.collect()
    assert await asyncio.to_thread(process.wait, 60) == 3


async def test_one_who_no_longer_waits_for_a_child_does_not_keep_others_from_it() -> None:
    child = ChildProcess(python(DEAF), stdout=DEVNULL)
    waiting = asyncio.ensure_future(child.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    child.kill()
    assert await child.wait() == -signal.SIGKILL


@pytest.mark.parametrize("end", ["ended", "killed", "stopped"])
async def test_a_guarded_child_ends_with_all_its_descendants(end: str) -> None:
    child = ChildProcess(python(DAEMON), stdout=PIPE, guard=Guard())
    daemon = psutil.Process(int(await child.first_line()))
    if end == "killed":
        child.kill()
        assert await child.wait() == -signal.SIGKILL
    elif end == "stopped":
        child.process.send_signal(signal.SIGSTOP)
    assert await child.end() == -signal.SIGKILL
    assert not daemon.is_running()


@pytest.mark.parametrize("guard", [None, Guard(600.0)])
@pytest.mark.parametrize("end", ["killed", "cancelled"])
async def test_a_child_is_killed_within_its_grace_time_if_nobody_can_wait(end: str, guard: Guard | None) -> None:
    child = ChildProcess(python(DEAF), stdout=PIPE, grace_s=600.0, guard=guard)
    assert await child.first_line() == b"up\n"
    ending = asyncio.create_task(child.end())
    await asyncio.sleep(0)
    if end == "killed":
        child.kill()
    else:
        ending.cancel()
    async with asyncio.timeout(30):
        assert await child.wait() == -signal.SIGKILL
        await asyncio.wait({ending})


async def test_output_goes_to_a_log_or_to_the_one_who_reads_it(tmp_path: Path) -> None:
    code = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    log, read = RotatingLog(tmp_path / "child.log"), bytearray()
    assert await ChildProcess(python(code), log=log).wait() == 0
    assert log.tail() == "out\nerr\n"
    await ChildProcess(python(code), stdout=PIPE, stderr=STDOUT, guard=Guard()).read_output(read.extend)
    assert read == b"out\nerr\n"


async def test_the_input_of_a_guarded_child_is_empty_and_it_says_why_it_cannot_be_started() -> None:
    read = bytearray()
    child = ChildProcess(["sh", "-c", "cat; pwd"], folder="/", stdout=PIPE, guard=Guard())
    await child.read_output(read.extend)
    assert read == b"/\n" and await child.wait() == 0
    missing = ChildProcess(["/no/such/program"], stdout=PIPE, stderr=STDOUT, guard=Guard())
    assert b"No such file" in await missing.first_line()
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/no/such/program"])
