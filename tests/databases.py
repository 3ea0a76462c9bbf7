"""Databases of the tests' own: SQLite files, and a real PostgreSQL server where the machine has one installed."""

import os
import shutil
import socket
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self
from uuid import uuid4

from leyden.store.database import Database


def empty_store(path: Path) -> Path:
    """Write an empty store, unless there is one; to create its tables takes as long as many a test."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        path.write_bytes(_empty_store())
    return path


@cache
def _empty_store() -> bytes:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "leyden.db"
        Database(file).close()
        return file.read_bytes()


def find_programs() -> Path | None:
    """The folder of initdb and postgres: on the path, or where Debian puts them."""
    candidates = [Path(found).resolve().parent for found in [shutil.which("initdb")] if found]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in candidates if (folder / "initdb").exists()), None)


class Postgres:
    """A server on a free port, that creates a new database for each test. PostgreSQL refuses to run as root."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self._user = "postgres" if os.geteuid() == 0 else None

    def __enter__(self) -> Self:
        data = self._folder / "data"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        if self._user:
            for folder in (self._folder, *self._folder.parents):
                if folder.owner() == "root" and len(folder.parts) > 2:
                    folder.chmod(0o755)
            shutil.chown(self._folder, self._user)
        self._run("initdb", "-D", str(data), "-A", "trust", "-U", "leyden")
        options = f"-p {self._port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run("pg_ctl", "-D", str(data), "-l", str(self._folder / "log"), "-w", "-o", options, "start")
        return self

    def __exit__(self, *_: object) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "stop")

    def new_database(self) -> str:
        name = f"t{uuid4().hex}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self._port), "-U", "leyden", name)
        return f"postgresql://leyden@127.0.0.1:{self._port}/{name}"

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._programs / program, *arguments],
            user=self._user,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._folder,
        )
