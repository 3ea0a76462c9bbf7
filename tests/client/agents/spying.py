"""An agent that tries to reach what it should not, calls the model, and returns what it could do."""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any


def spy(task: dict[str, Any]) -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parent))
    import plain  # the agent's folder and the interpreter's packages can be read

    return {
        "answer": plain.act({"n": 7}),
        "user": os.getuid(),
        "read": [path for path in task.get("read", ()) if _can_read(path)],
        "wrote": [path for path in task.get("write", ()) if _can_write(path)],
        "scratch": _can_write(os.environ["TMPDIR"]) if "TMPDIR" in os.environ else None,
        "connected": [port for port in task.get("connect", ()) if _can_connect(port)],
        "signalled": [pid for pid in task.get("signal", ()) if _can_signal(pid)],
        "leaked": [
            path
            for path in map(str, Path("/proc").glob("[0-9]*/environ"))
            if "reversed" in task and task["reversed"][::-1].encode() in _bytes_of(path)
        ],
        "variables": [name for name in task.get("variables", ()) if name in os.environ],
        "environment": [path for path in Path("/proc").glob("[0-9]*/environ") if _can_read(str(path))].__len__(),
    }


def _can_read(path: str) -> bool:
    return bool(_bytes_of(path))


def _bytes_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _can_write(folder: str) -> bool:
    try:
        (Path(folder) / "written-by-a-spy").write_text("x")
    except OSError:
        return False
    return True


def _can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
    except OSError:
        return False
    return True


def _can_signal(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGCONT)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    print(json.dumps({"result": spy(json.load(sys.stdin)), "reward": 1.0}))
