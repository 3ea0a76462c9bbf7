"""Launches processes with agent code as `workers.isolation` says."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from leyden.client.agent_process import inherited_environment
from leyden.client.isolation.options import IsolationOptions, Mode, SandboxUnavailable
from leyden.client.isolation.sandbox import sandboxed, server_inside
from leyden.client.isolation.sandbox_files import SCRATCH, is_public
from leyden.client.isolation.user_ids import AllocatedUser, allocate_user
from leyden.decoding import decode_text
from leyden.user_code.loading import LoadError

_PROBE_TIMEOUT_S = 60.0
_USER_NAME = "leyden-agent"


class Launch(Struct, frozen=True):
    """A command as it is started: wrapped, with its variables, and the user id that its process takes first."""

    command: Sequence[str]
    environment: Mapping[str, str]
    user: int | None = None
    allocated: AllocatedUser | None = None

    def release(self) -> None:
        """Release the user id, once no process of the launch runs any more."""
        if self.allocated is not None:
            self.allocated.release()

    def release_in_child(self) -> "subprocess.Popen[bytes] | None":
        """Do the same without waiting if it takes long: a child process then has the user id until it ends."""
        return self.allocated.release_in_child() if self.allocated is not None else None


def agents_server(options: IsolationOptions) -> str:
    """Return the gateway's URL for the agents' processes."""
    return server_inside(options) if options.mode == "sandbox" else options.server


def launch(options: IsolationOptions, command: Sequence[str], folder: str, environment: Mapping[str, str]) -> Launch:
    """Prepare a command for its start. The caller calls `release` when it has ended."""
    if options.mode == "none":
        return Launch(command, environment)
    allocated = allocate_user() if os.geteuid() == 0 else None
    if options.mode == "user":
        if allocated is None:
            raise SandboxUnavailable("only root can give agents their own user ids")
        return Launch(command, {**environment, **_home(str(allocated.scratch))}, allocated.id, allocated)
    try:
        words = sandboxed(options, command, folder, allocated.id if allocated is not None else None)
    except BaseException:
        if allocated is not None:
            allocated.release()
        raise
    return Launch(words, {**environment, **_home(SCRATCH)}, None, allocated)


def check(options: IsolationOptions, probe: Sequence[str]) -> None:
    """Raise `SandboxUnavailable` if the command `probe` fails under these options.

    If agents could read a key, raise `LoadError`: that is no reason for `auto` to isolate less.
    """
    if options.mode == "user" and (public := [each for each in options.hidden if is_public(Path(each))]):
        raise LoadError(f"every user can read the key in {public[0]}: chmod 600 {public[0]}")
    started = launch(options, probe, options.base, inherited_environment(options))
    try:
        ran = subprocess.run(
            list(started.command),
            env=dict(started.environment),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            user=started.user,
            group=started.user,
            extra_groups=None if started.user is None else (),
        )
    except PermissionError as error:
        raise SandboxUnavailable(f"other users cannot run {error.filename}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(str(error)) from error
    finally:
        started.release()
    if ran.returncode != 0:
        lines = decode_text(ran.stderr).strip().splitlines()
        raise SandboxUnavailable(lines[-1] if lines else f"exit status {ran.returncode}")


def _home(scratch: str) -> dict[str, str]:
    return {"HOME": scratch, "TMPDIR": scratch, "USER": _USER_NAME, "LOGNAME": _USER_NAME}


def describe(mode: Mode) -> str:
    """Return one line about a mode."""
    match mode:
        case "none":
            return "agents run as this user: they can read what you can (workers.isolation = none)"
        case "user":
            return "each agent process has its own user id and cannot read this run (workers.isolation = user)"
        case "sandbox":
            return "agents run in sandboxes without your files and your network (workers.isolation = sandbox)"
