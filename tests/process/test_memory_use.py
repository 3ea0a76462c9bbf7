"""What counts as memory of processes, each once."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from leyden.process.memory_use import exceed

MB = 1 << 20
HELD = {
    "private": "hold = bytearray(b'x') * size",
    "shared": "hold = mmap.mmap(-1, size); hold.write(bytes(b'x') * size)",
    "shared with children": "hold = mmap.mmap(-1, size); hold.write(bytes(b'x') * size); children = 3",
    "inherited by children": "hold = bytearray(b'x') * size; children = 3",
    "open memory file": "fd = os.memfd_create('m'); [os.write(fd, b'x' * MB) for _ in range(size // MB)]",
    "mapped memory file": "fd = os.memfd_create('m'); os.ftruncate(fd, size); hold = mmap.mmap(fd, size); "
    "hold.write(b'x' * size)",
    "closed memory file": "fd = os.memfd_create('m'); os.ftruncate(fd, size); hold = mmap.mmap(fd, size); "
    "os.close(fd); hold.write(b'x' * size)",
    "file in shared memory": "hold = shared_memory.SharedMemory(create=True, size=size); "
    "hold.unlink(); hold.buf[:] = b'x' * size",
}
PROGRAM = """
import mmap, os, sys
from multiprocessing import shared_memory
MB = 1 << 20
size, children = 64 * MB, 0
{hold}
for _ in range(children):
    if os.fork() == 0:
        hold[:1], hold[::4096]
        sys.stdin.read()
        os._exit(0)
print("held", flush=True)
sys.stdin.read()
os._exit(0)
"""


@contextmanager
def running(hold: str) -> Iterator[list[int]]:
    """Run a program that holds 64 MB, and return its processes."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM.format(hold=hold)], stdin=-1, stdout=-1) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == b"held\n"
        children = psutil.Process(process.pid).children(recursive=True)
        yield [process.pid, *(child.pid for child in children)]
        process.stdin.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted on Linux only")
@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_memory_counts_once_however_it_is_held(hold: str) -> None:
    with running(hold) as pids:
        assert exceed(pids, 64 * MB)
        assert not exceed(pids, (64 + 48) * MB)


def can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


HIDING = """
import ctypes, os, signal, time
from leyden.process.memory_use import exceed
MB = 1 << 20
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)
reading, writing = os.pipe()
if (pid := os.fork()) == 0:
    fd = os.memfd_create("m")
    [os.write(fd, b"x" * MB) for _ in range(64)]
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    os.write(writing, b"held")
    signal.pause()
os.read(reading, 4)
def seen():  # asked again, as a guardian does: what others write and delete meanwhile may hide it for a moment
    return exceed([pid], 64 * MB) or time.sleep(0.1)
print(any(seen() for _ in range(300)), exceed([pid], 1 << 60))
os.kill(pid, signal.SIGKILL)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
print(exceed([pid], 0))
os.waitpid(pid, 0)
"""


COVERED = """
mount -t tmpfs below /dev/shm && mount -t tmpfs above /dev/shm && head -c 128M /dev/zero > /dev/shm/file && exec "$@"
"""


@pytest.mark.skipif(not can_mount(), reason="file systems cannot be mounted here")
def test_a_file_system_in_memory_that_another_one_covers_hides_nothing() -> None:
    covered = ["unshare", "--mount", "sh", "-c", COVERED, "sh"]
    found = subprocess.run([*covered, sys.executable, "-c", HIDING], capture_output=True, check=True, text=True)
    assert found.stdout.splitlines() == ["True False", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted on Linux only")
def test_a_process_that_hides_its_memory_files_is_taken_to_have_them() -> None:
    found = subprocess.run([sys.executable, "-c", HIDING], capture_output=True, check=True, text=True)
    assert found.stdout.splitlines() == ["True False", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted on Linux only")
def test_processes_that_have_ended_hold_nothing() -> None:
    with running("") as pids:
        pass
    assert not exceed(pids, 0)
