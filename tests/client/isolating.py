"""Which kinds of isolation work here, and programs that run as users who are not root."""

import asyncio
import contextlib
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from leyden.client.agent_process import inherited_environment
from leyden.client.isolation import user_ids
from leyden.client.isolation.launcher import launch
from leyden.client.isolation.options import IsolationOptions
from leyden.client.isolation.running import IsolationRequest, running_isolation
from leyden.process.guardian import Guard, Program, fork_guardian

IS_ROOT = os.geteuid() == 0


PROBE = ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")


def _sandbox_works() -> bool:
    return shutil.which("bwrap") is not None and subprocess.run([*PROBE, "true"], capture_output=True).returncode == 0


needs_sandbox = pytest.mark.skipif(not _sandbox_works(), reason="bubblewrap does not work here")
needs_root = pytest.mark.skipif(not IS_ROOT, reason="needs root")


@functools.cache
def public_python(folder: Path) -> str:
    """An interpreter that other users can run with this checkout; skips the test where there is none."""
    ours = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    probe = "import leyden.client.host.main, openai, os, sys; os.listdir(sys.argv[1])"
    for python in filter(os.path.exists, (sys.executable, ours)):
        variables = {"PYTHONPATH": module_path(), "HOME": "/", "PATH": os.environ["PATH"]}
        words = [python, "-P", "-c", probe, str(folder)]
        with contextlib.suppress(PermissionError):
            tried = subprocess.run(
                words,
                env=variables,
                cwd="/",
                user=user_ids.LAST,
                group=user_ids.LAST,
                extra_groups=(),
                capture_output=True,
            )
            if tried.returncode == 0:
                return python
    pytest.skip("other users cannot run any interpreter with this checkout")


def module_path() -> str:
    """The folders of modules that do not come with the interpreter."""
    folders = (path for path in sys.path if path and Path(path).is_dir() and not path.startswith(sys.base_prefix))
    return os.pathsep.join(folders)


class SandboxedProgram(msgspec.Struct):
    """A Python program that runs in a sandbox with these options."""

    program: str
    options: IsolationOptions


class ProgramEnd(msgspec.Struct):
    """What it printed, and what its guardian reported."""

    output: str
    report: str


def run_sandboxed(sandboxed: SandboxedProgram, as_root: bool) -> ProgramEnd:
    """Run it, from a process of root or of another user. The folders must be readable by other users."""
    if as_root and not IS_ROOT:
        pytest.skip("needs root")
    user: dict[str, Any] = {}
    if IS_ROOT and not as_root:
        user = {"user": user_ids.LAST, "group": user_ids.LAST, "extra_groups": ()}
    tried = subprocess.run([*PROBE, "--unshare-user", "true"], capture_output=True, text=True, **user)
    if tried.returncode != 0:
        pytest.skip(f"users who are not root cannot create sandboxes here: {tried.stderr.strip()}")
    python = public_python(Path("/")) if IS_ROOT else sys.executable
    modules = os.pathsep.join((module_path(), str(Path(__file__).parent)))
    ran = subprocess.run(
        [python, "-P", "-m", "isolating", msgspec.json.encode(sandboxed).decode()],
        env={"PYTHONPATH": modules, "HOME": "/nowhere", "PATH": os.environ["PATH"]},
        cwd="/",
        capture_output=True,
        text=True,
        **user,
    )
    assert ran.returncode == 0, ran.stderr
    return msgspec.json.decode(ran.stdout, type=ProgramEnd)


async def _run(sandboxed: SandboxedProgram) -> ProgramEnd:
    request = IsolationRequest(choice="sandbox", probe=("true",), agent="x", options=sandboxed.options)
    async with running_isolation(request) as isolation:
        return await asyncio.to_thread(_guarded, sandboxed, isolation.options)


def _guarded(sandboxed: SandboxedProgram, options: IsolationOptions) -> ProgramEnd:
    command = [sys.executable, "-P", "-c", sandboxed.program]
    launched = launch(options, command, options.base, inherited_environment(options))
    (output, printing), (report, reporting), (control, controlling) = os.pipe(), os.pipe(), os.pipe()
    guard = Guard(user=launched.user, memory_mb=options.rollout.memory_mb)
    program = Program(launched.command, launched.environment, guard, "/", (0, printing, 2))
    pid = fork_guardian(program, control, reporting)
    os.close(printing)
    os.close(reporting)
    with os.fdopen(output) as printed, os.fdopen(report) as reported:
        end = ProgramEnd(printed.read(), reported.read())
    os.waitpid(pid, 0)
    os.close(control)
    os.close(controlling)
    launched.release()
    return end


if __name__ == "__main__":
    wanted = msgspec.json.decode(sys.argv[1], type=SandboxedProgram)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_run(wanted))))
