"""Runs a program that leaves no process behind: `python -m leyden.process.guardian OPTIONS PROGRAM ...`.

A *guardian* process starts the program in its own session and adopts every orphan of it, whatever session, process
group or environment the orphan has. When the program ends, when told to, or when the process that started the guardian
is gone, the guardian kills all of them. It ends as the program did: with the same status or by the same signal. If the
guardian is killed, the kernel kills the program; if it is stopped, it continues when its parent ends or says so.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

from leyden.process.descendants import (
    adopt_orphans,
    descendants,
    kill_children,
    reap,
    set_name,
    signal_when_parent_ends,
)
from leyden.process.memory_use import exceed

NAME = "leyden-guardian"
TERMINATE, END, KILL = b"T", b"E", b"K"
"""Bytes on the control pipe: send SIGTERM to the program's group; do as when the pipe closes; kill all at once."""
KILL_TIMEOUT_S = 10.0
_MEMORY_CHECK_S = 1.0
CANNOT_RUN = 127
MAX_PROCESSES = 4096
"""Processes and threads of a program that has its own user id."""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Guard(NamedTuple):
    """What a guardian sees to besides that no process is left."""

    grace_s: float = 0.0
    """How long the program may continue when the control pipe closes."""
    terminate: bool = False
    """Whether it receives SIGTERM when the control pipe closes."""
    user: int | None = None
    """User and group id that the program gets, without other groups; needs root."""
    memory_mb: int | None = None
    """Memory that the program and all its descendants may hold together; checked every second."""


class Program(NamedTuple):
    """What a guardian runs."""

    command: Sequence[str]
    environment: Mapping[str, str]
    guard: Guard
    folder: str | None = None
    streams: tuple[int, int, int] = (0, 1, 2)
    """Descriptors of its standard streams."""
    pass_fds: tuple[int, ...] = ()
    prepare: Callable[[], None] | None = None
    """Called in the forked process before the program replaces it, to set limits."""


def fork_guardian(program: Program, control: int, report: int) -> int:
    """Start a program under a guardian and return the guardian's pid. The calling process must have one thread.

    The guardian reads the pipe `control`. `report` is a pipe that receives the reason if the program cannot be
    started, or `over_memory`, and that closes when the guardian ends. The caller closes its own copies.
    """
    if (pid := os.fork()) != 0:
        return pid
    try:
        _guard(program, control, report)
    except BaseException as error:
        _fail(report, error)


def _guard(program: Program, control: int, report: int) -> NoReturn:
    os.setsid()
    signal_when_parent_ends(signal.SIGCONT)
    adopt_orphans()
    set_name(NAME)
    _close_all_but((*program.streams, *program.pass_fds, control, report))
    woken = _wake_on_child()
    pid = os.fork()
    if pid == 0:
        _exec(program, report)
    _close_all_but((control, report, *woken))
    end_like(_wait(pid, control, report, woken[0], program.guard))


def _wait(pid: int, control: int, report: int, woken: int, guard: Guard) -> int:
    """Wait until the program ends or must end, kill what is left of it, and return its wait status."""
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(control, select.POLLIN)
    deadline: float | None = None
    ended: dict[int, int] = {}
    while pid not in ended and (deadline is None or time.monotonic() < deadline):
        waits = [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        waits += [] if guard.memory_mb is None else [_MEMORY_CHECK_S]
        ready = poll.poll(1e3 * min(waits) if waits else None)
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        if any(fd == control for fd, _ in ready):
            message = os.read(control, 1)
            if message == KILL:
                break
            if not message:
                poll.unregister(control)
            ends = message in (END, b"") and deadline is None
            if ends:
                deadline = time.monotonic() + guard.grace_s
            if message == TERMINATE or (ends and guard.terminate):
                _kill_group(pid, signal.SIGTERM)
        ended |= reap()
        if guard.memory_mb is not None and exceed(descendants(), guard.memory_mb << 20):
            with suppress(OSError):
                os.write(report, over_memory(guard.memory_mb))
            break
    _kill_group(pid, signal.SIGKILL)
    ended |= kill_children(KILL_TIMEOUT_S)
    return ended.get(pid, signal.SIGKILL)


def over_memory(memory_mb: int) -> bytes:
    """Return what is reported when a program with its descendants is killed because they hold too much memory."""
    return f"its processes together held more than {memory_mb} MB of memory (`memory_mb`)".encode()


def _exec(program: Program, report: int) -> NoReturn:
    """Become the program."""
    try:
        os.setsid()
        for number in _IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        sources = [os.dup(fd) for fd in program.streams]
        for target, source in enumerate(sources):
            os.dup2(source, target)
        _close_all_but((0, 1, 2, *program.pass_fds, report))
        for fd in program.pass_fds:
            os.set_inheritable(fd, True)
        os.set_inheritable(report, False)
        if program.folder is not None:
            os.chdir(program.folder)
        if program.prepare is not None:
            program.prepare()
        if (user := program.guard.user) is not None:
            resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        signal_when_parent_ends(signal.SIGKILL)
        os.execvpe(program.command[0], list(program.command), dict(program.environment))
    except BaseException as error:
        _fail(report, error)


def _fail(report: int, error: BaseException) -> NoReturn:
    with suppress(OSError):
        os.write(report, f"{error}\n".encode(errors="replace"))
    os._exit(CANNOT_RUN)


def _wake_on_child() -> tuple[int, int]:
    """Return a pipe that becomes readable when a child ends. Block all other signals: only the pipe ends a guardian."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.pthread_sigmask(signal.SIG_SETMASK, set(signal.Signals) - {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading, writing


def _kill_group(pid: int, number: signal.Signals) -> None:
    with suppress(OSError):
        os.killpg(pid, number)


def _close_all_but(kept: Iterable[int]) -> None:
    start = 0
    for fd in sorted(set(kept)):
        if start < fd:  # closerange(0, 0) closes all
            os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def end_like(status: int) -> NoReturn:
    """End this process as a child did that had this wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), -code)
    os._exit(128 - code)


def exit_reason(code: int) -> str:
    """Describe how a process ended, by its exit status or, as a negative number, the signal that killed it."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-code}"


def main(options: str, command: Sequence[str]) -> NoReturn:
    """Run a command under a guardian, and guard the guardian: a program may kill or stop its parent.

    If it is killed, its orphans die here; if it is stopped, it continues at once.
    """
    pass_fds, report, *guard = json.loads(options)
    signal.pthread_sigmask(signal.SIG_SETMASK, set(signal.Signals) - {signal.SIGCHLD})
    signal_when_parent_ends(signal.SIGCONT)
    adopt_orphans()
    set_name(NAME)
    streams = (os.open(os.devnull, os.O_RDONLY), 1, 2)
    program = Program(command, os.environ, Guard(*guard), streams=streams, pass_fds=tuple(pass_fds))
    guardian = fork_guardian(program, 0, os.dup(report))
    _close_all_but(())
    while os.WIFSTOPPED(status := os.waitpid(guardian, os.WUNTRACED)[1]):
        os.kill(guardian, signal.SIGCONT)
    kill_children(KILL_TIMEOUT_S)
    end_like(status)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
