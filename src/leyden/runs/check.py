"""`leyden check`: verifies the database, the recorded calls and the checkpoints of a run, and changes nothing."""

import sqlite3
from contextlib import closing
from pathlib import Path

from msgspec import Struct
from sqlalchemy import select

from leyden.runs.checkpoint_files import checkpoint_folder, checkpoint_policies, checkpoint_steps, find_damage
from leyden.runs.run_names import STORE_NAME
from leyden.store import schema
from leyden.store.database import Database
from leyden.store.errors import StoreUnusable
from leyden.store.read import queries

_MAX_PROBLEMS = 20
"""How many problems of one kind are listed."""


class CheckedPart(Struct, frozen=True):
    """One part of a run and what is wrong with it."""

    name: str
    detail: str
    problems: tuple[str, ...] = ()


def check_run(folder: Path) -> list[CheckedPart]:
    """Verify everything that a run keeps."""
    parts = []
    if (database := folder / STORE_NAME).exists():
        parts.append(_check_file(database))
        parts.append(_check_records(database))
    for policy in checkpoint_policies(folder):
        paths = (checkpoint_folder(folder, policy) / f"step-{step}" for step in checkpoint_steps(folder, policy))
        parts += [_check_checkpoint(path, str(path.relative_to(folder))) for path in paths]
    return parts


def _check_checkpoint(path: Path, name: str) -> CheckedPart:
    """Compare the files of a checkpoint with its checksums."""
    if (damage := find_damage(path)) is not None:
        return CheckedPart(name, "damaged", (damage,))
    return CheckedPart(name, "checksums match")


def _check_file(path: Path) -> CheckedPart:
    """Let SQLite check the structure of the file, its indices and its references."""
    problems: list[str] = []
    try:
        with closing(sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True)) as connection:
            found = [row[0] for row in connection.execute(f"PRAGMA integrity_check({_MAX_PROBLEMS})")]
            problems += [line for line in found if line != "ok"]
            references = connection.execute("PRAGMA foreign_key_check").fetchmany(_MAX_PROBLEMS)
            problems += [
                f"row {row} of {table} refers to a missing row of {other}" for table, row, other, _ in references
            ]
    except sqlite3.Error as error:
        problems.append(str(error))
    return CheckedPart(path.name, f"{path.stat().st_size / 2**20:.1f} MiB", tuple(problems))


def _check_records(path: Path) -> CheckedPart:
    """Decode every attempt with its calls, spans and rewards."""
    try:
        database = Database(path, readonly=True)
    except StoreUnusable as error:
        return CheckedPart("records", "not readable", (str(error),))
    problems: list[str] = []
    attempts = calls = 0
    try:
        with database.reader.begin() as connection:
            for run, attempt in connection.execute(select(schema.attempts.c.run_id, schema.attempts.c.id)).all():
                try:
                    calls += len(queries.get_episode(connection, run, attempt).calls)
                except Exception as error:  # whatever decoding damaged bytes raises
                    problems.append(f"attempt {attempt} cannot be read: {str(error).partition(chr(10))[0]}")
                attempts += 1
    except Exception as error:
        problems.append(str(error).partition("\n")[0])
    finally:
        database.close()
    hidden = len(problems) - _MAX_PROBLEMS
    listed = (*problems[:_MAX_PROBLEMS], *([f"and {hidden} more"] if hidden > 0 else []))
    return CheckedPart("records", f"{attempts} attempts, {calls} calls", listed)
