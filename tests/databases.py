"""Databases of the tests' own: SQLite files, and a real PostgreSQL server where the machine has one installed."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import psycopg

from leyden.store.database import Database

_PORT = "LEYDEN_TEST_POSTGRES"
"""The environment variable with the port of the server that tests share."""


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


@contextmanager
def running_postgres() -> Iterator["Postgres | None"]:
    """Run a PostgreSQL server, or use the one of the process that started this one: all workers of pytest share it.

    None where the machine has none installed. Its folder is not pytest's: another session of pytest, started meanwhile,
    may clear that away.
    """
    if (port := os.environ.get(_PORT)) is not None:
        yield Postgres(int(port))
    elif (programs := find_programs()) is None:
        yield None
    else:
        with TemporaryDirectory() as folder, _served(programs, Path(folder)) as server:
            os.environ[_PORT] = str(server.port)
            yield server
            del os.environ[_PORT]


class Postgres:
    """A server at a port of this machine, that creates a new database for each test."""

    def __init__(self, port: int) -> None:
        self.port = port

    def new_database(self, template: str = "store") -> str:
        """Return the URL of a copy of another one: of an empty store, whose tables take as long as many a test."""
        name = f"t{uuid4().hex}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return self.url(name)

    def url(self, database: str) -> str:
        """The URL of one of its databases."""
        return f"postgresql://leyden@127.0.0.1:{self.port}/{database}"


@contextmanager
def _served(programs: Path, folder: Path) -> Iterator[Postgres]:
    """Serve databases in a folder. PostgreSQL refuses to run as root."""
    data, user = folder / "data", "postgres" if os.geteuid() == 0 else None

    def run(program: str, *arguments: str) -> None:
        null = subprocess.DEVNULL
        command = [programs / program, *arguments]
        subprocess.run(command, user=user, check=True, stdout=null, stderr=null, cwd=folder)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = Postgres(free.getsockname()[1])
    if user:
        for each in (folder, *folder.parents):
            if each.owner() == "root" and len(each.parts) > 2:
                each.chmod(0o755)
        shutil.chown(folder, user)
    run("initdb", "-D", str(data), "-A", "trust", "-U", "leyden")
    options = f"-p {server.port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=500"
    run("pg_ctl", "-D", str(data), "-l", str(folder / "log"), "-w", "-o", options, "start")
    try:
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            connection.execute("CREATE DATABASE store")
        Database(server.url("store")).close()
        yield server
    finally:
        run("pg_ctl", "-D", str(data), "-m", "immediate", "stop")
