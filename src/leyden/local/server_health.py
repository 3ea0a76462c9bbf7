"""Finds out that a server process is alive and does not answer.

Only time counts in which the server could have answered. While it is stopped (by a debugger, say), waits for the disk,
or is ready to run and the machine gives it no CPU, it is not to blame, and starting it again would not help.
"""

import asyncio
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

_INTERVAL_S, _TIMEOUT_S = 5.0, 10.0
MAX_SILENT_S = 60.0
"""How long a server that could answer may not answer."""
_NOT_ITS_FAULT = "TtD"
"""States of a process (proc(5)): stopped, traced, waiting for the disk."""


async def wait_unresponsive(url: str, pid: int) -> None:
    """Return when a server has not answered for a minute in which it could have."""
    silent_s, before, waited_s = 0.0, time.monotonic(), _waited_s(pid)
    while silent_s < MAX_SILENT_S:
        await asyncio.sleep(_INTERVAL_S)
        # In a thread: the answer counts even if this process was too busy to see it come.
        answers = await asyncio.to_thread(_answers, url)
        # This process may have been stopped too, so no check counts for more than it takes.
        passed_s = min(time.monotonic() - before, _INTERVAL_S + _TIMEOUT_S)
        starved_s = _waited_s(pid) - waited_s
        before, waited_s = time.monotonic(), waited_s + starved_s
        if answers:
            silent_s = 0.0
        elif _state(pid) not in _NOT_ITS_FAULT:
            silent_s += max(0.0, passed_s - starved_s)


def _answers(url: str) -> bool:
    address = urlsplit(url)
    connection = HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/healthz")
        connection.getresponse()
    except (TimeoutError, ConnectionRefusedError):
        return False
    except (OSError, HTTPException):  # a server that closes a connection, since it has too many, runs
        return True
    else:
        return True
    finally:
        connection.close()


def _waited_s(pid: int) -> float:
    """Return how long the main thread of a process was ready to run and had no CPU; 0 if that is not known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, LookupError, ValueError):
        return 0.0


def _state(pid: int) -> str:
    """Return the letter of a process's state; R if it is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "R"
