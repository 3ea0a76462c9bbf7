"""A real server in a separate process."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self
from uuid import uuid4

import msgspec
from forked_commands import ForkedCommand, start_command

from leyden.server.control.keys import KeyKind, Keyring
from leyden.server.options import RunningServer


def delete_store(home: Path) -> None:
    """Delete the files of a server's store, as a user does who cleans up too early."""
    for file in home.glob("leyden.db*"):
        file.unlink()


class ServerProcess:
    """`leyden serve` on a free port. Started again after a kill, it listens on the same port."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self.home = home
        self.arguments = arguments
        self.prefix: tuple[str, ...] = ()
        """A command that runs the server, such as one that sets limits."""
        self.port = "0"

    def start(self) -> Self:
        words = ("serve", "--json", "--home", str(self.home), "--port", self.port, *self.arguments)
        if self.prefix:
            command = [*self.prefix, sys.executable, "-m", "leyden", *words]
            self.process: ForkedCommand | subprocess.Popen[bytes] = subprocess.Popen(command, stdout=subprocess.PIPE)
        else:
            self.process = start_command(*words, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: exit status {self.process.wait()}")
        self.running = msgspec.json.decode(line, type=RunningServer)
        self.port = self.running.url.rpartition(":")[2]
        return self

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def admin_key(self) -> str:
        return Path(self.running.admin_key_file).read_text().strip()

    def key(self, kind: KeyKind, ttl_s: float = 3600.0, **scope: str) -> str:
        """A key made with the server's own secret."""
        return Keyring.from_file(self.home / "secret", time.time).create(kind, ttl_s, **scope)[0]

    def key_file(self, kind: KeyKind, ttl_s: float = 3600.0, **scope: str) -> Path:
        """A file with such a key."""
        path = self.home / f"{uuid4().hex}.key"
        path.write_text(self.key(kind, ttl_s, **scope))
        return path

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and wait for a graceful end."""
        self.process.terminate()
        return self.process.wait(timeout=60)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
