"""Installs the systems that Leyden is measured beside, each in its own virtual environment under .bench."""

import socket
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

HOME = Path(__file__).parent.parent / ".bench"


def install(name: str, packages: Sequence[str]) -> Path:
    """Install packages into the environment of that name unless they are; return its folder of programs."""
    home = HOME / name
    if not (home / "ready").exists():
        print("installing the peer ...", flush=True)
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin" / "python", "-m", "pip", "install", "--quiet", *packages], check=True)
        (home / "ready").touch()
    return home / "bin"


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
