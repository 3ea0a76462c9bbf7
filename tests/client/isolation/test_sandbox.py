"""What programs can read, write and hold in sandboxes, of root and of a user who is not root."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from isolating import SandboxedProgram, needs_sandbox, run_sandboxed
from worker_harness import in_sections

from leyden.client.isolation.options import IsolationOptions

pytestmark = needs_sandbox
by_root = pytest.mark.parametrize("as_root", [True, False], ids=["root", "not root"])


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can read."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "agent").mkdir()
        yield Path(name)


def run(folder: Path, program: str, as_root: bool, **options: object) -> tuple[str, str]:
    """Run a program and return its output and the report of its guardian."""
    fields = {"server": "http://127.0.0.1:50009", "base": str(folder / "agent"), **options}
    end = run_sandboxed(SandboxedProgram(program, IsolationOptions(**in_sections(**fields))), as_root)
    return end.output, end.report


@by_root
def test_a_port_that_cannot_be_forwarded_is_named(folder: Path, as_root: bool) -> None:
    if as_root:
        assert run(folder, "print(1)", as_root, server="http://127.0.0.1:443")[0] == "1\n"
    else:
        with pytest.raises(AssertionError, match="only root's sandboxes can forward port 443: use one above 1023"):
            run(folder, "print(1)", as_root, server="http://127.0.0.1:443")


READ = """
import os
for folder, _, files in os.walk({folder!r}):
    for name in files:
        path = os.path.join(folder, name)
        try:
            print(os.path.relpath(path, {folder!r}), open(path).read())
        except OSError:
            print(os.path.relpath(path, {folder!r}))
"""


def write(path: Path, text: str) -> Path:
    """Write a file that every user can read, in folders that every user can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@by_root
def test_keys_and_runs_are_hidden_by_every_path_that_leads_to_them(folder: Path, as_root: bool) -> None:
    agent, data = folder / "agent", folder / "data"
    key = write(agent / "worker.key", "leyden-of-the-worker")
    write(agent / "notes.key", "no key of ours")
    write(agent / "old" / "runs" / "mine" / "admin.key", "leyden-of-the-admin")
    write(agent / "old" / "runs" / "mine" / "secret", "of the server")
    write(agent / "runs" / "mine" / "leyden.db", "recorded")
    write(agent / "runs" / "mine" / "step-5" / "model", "weights")
    write(agent / "runs" / "mine" / "step-5" / "my.key", "leyden-named-otherwise")
    write(data / "another name", "leyden-of-any-name")
    write(data / "rows", "data")
    (folder / "link").symlink_to(agent / "worker.key")
    (folder / "agent too").symlink_to(agent)
    (agent / "linked").symlink_to(key)
    options = {
        "hidden": tuple(map(str, (folder / "link", folder / "agent too" / "runs", data / "another name"))),
        "readable": tuple(map(str, (folder / "agent too", agent / "runs" / "mine" / "step-5"))),
        "writable": (str(data),),
    }
    seen = run(folder, READ.format(folder=str(folder)), as_root, **options)[0]
    assert "leyden-" not in seen and "of the server" not in seen and "recorded" not in seen
    assert {"agent/notes.key no key of ours", "agent/runs/mine/step-5/model weights", "data/rows data"} <= {
        *seen.splitlines()
    }


@by_root
def test_a_folder_that_is_named_is_seen_without_the_key_in_it(folder: Path, as_root: bool) -> None:
    key = write(folder / "keys" / "worker.key", "leyden-of-the-worker")
    write(folder / "keys" / "rows", "data")
    for kind in ("readable", "writable"):
        named = {kind: (str(key.parent), str(key)), "hidden": (str(key),)}
        seen = run(folder, READ.format(folder=str(folder / "keys")), as_root, **named)[0]
        assert "rows data" in seen and "leyden-" not in seen


POOL = """
import multiprocessing
from multiprocessing import shared_memory
with multiprocessing.Lock(), multiprocessing.get_context("fork").Pool(2) as pool:
    block = shared_memory.SharedMemory(create=True, size=1 << 20)
    block.unlink()
    print(pool.map(abs, [-1, 2]))
"""


@by_root
def test_multiprocessing_works_in_a_sandbox(folder: Path, as_root: bool) -> None:
    assert run(folder, POOL, as_root)[0] == "[1, 2]\n"


FILES = """
import errno, os, time
MB = 1 << 20
for name in ("/tmp/a", "/dev/shm/a"):
    with open(name, "wb", 0) as file:
        for _ in range(150):
            file.write(b"x" * MB)
print("written", flush=True)
time.sleep(600)
"""
SIZES = """
import os
for folder in ("/tmp", "/dev/shm"):
    size = os.statvfs(folder)
    print(folder, size.f_blocks * size.f_frsize >> 20)
for folder in ("/", "/dev", "/run", "/home"):
    try:
        open(os.path.join(folder, "file"), "w")
    except OSError:
        continue
    print(folder, "can be written to")
"""


@by_root
def test_files_in_memory_count_as_memory_of_a_program_in_a_sandbox(folder: Path, as_root: bool) -> None:
    output, report = run(folder, FILES, as_root, memory_mb=200)
    assert output in ("", "written\n")
    assert report == "its processes together held more than 200 MB of memory (`memory_mb`)"


@by_root
def test_no_file_system_in_memory_of_a_sandbox_is_larger_than_the_limit(folder: Path, as_root: bool) -> None:
    assert run(folder, SIZES, as_root, memory_mb=200)[0] == "/tmp 200\n/dev/shm 200\n"


MOUNTED = """
import subprocess, sys
OPEN = "import ctypes, sys; sys.exit(ctypes.CDLL(None).syscall(430, b'tmpfs', 0) != -1)"
own_namespaces = ("unshare", "--user", "--map-root-user", "--mount", "--propagation", "unchanged")
mount = ("mount", "-t", "tmpfs", "memory", "/tmp")
print(subprocess.run([*own_namespaces, *mount], stderr=subprocess.DEVNULL).returncode != 0)
print(subprocess.run([*own_namespaces, sys.executable, "-c", OPEN]).returncode == 0)
"""


@by_root
def test_no_program_in_a_sandbox_mounts_memory_that_nobody_can_count(folder: Path, as_root: bool) -> None:
    assert run(folder, MOUNTED, as_root, memory_mb=200) == ("True\nTrue\n", "")
