"""Reads the rows of files of tasks: JSON objects, one a line or in an array, CSV with a header, Parquet or Arrow.

Each row has the number of its line, or of its place in the array or table. A byte order mark at the beginning is
skipped. Parquet and Arrow are what data sets of Hugging Face are, downloaded or saved to a folder; they need pyarrow.
"""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from leyden.config import ConfigError
from leyden.config.reading import near_file
from leyden.extras import install_command
from leyden.user_code.task_files import TABLES, task_files


def read_rows(path: Path, key: str, columns: Mapping[str, str] = {}) -> list[tuple[int, dict[str, Any]]]:
    """Read the rows of a file, of the tables of a folder, or of the files that match a pattern.

    `key` is the configuration key that names it, for errors. `columns` has new names of columns and their names in the
    files.
    """
    files = task_files(path)
    if not files:
        raise ConfigError(f"`{key}`: {path} names no {' or '.join(TABLES)} file")
    rows = [row for file in files for row in _file_rows(file, key)]
    if len(files) > 1:
        rows = [(number, row) for number, (_, row) in enumerate(rows, 1)]
    return [(number, _rename(path, row, columns)) for number, row in rows] if columns else rows


def _rename(path: Path, row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    missing = [old for old in columns.values() if old not in row]
    if missing:
        raise ConfigError(f"`columns`: {path} has no {missing[0]!r}; it has {', '.join(row)}")
    new = {name: row[old] for name, old in columns.items()}
    return {**{name: value for name, value in row.items() if name not in {*new, *columns.values()}}, **new}


def _file_rows(path: Path, key: str) -> list[tuple[int, dict[str, Any]]]:
    if path.suffix in TABLES and path.exists():
        return list(enumerate(_table_rows(path, key), 1))
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ConfigError(f"`{key}`: {path}: {error.strerror}{near_file(path)}") from error
    if path.suffix == ".csv":
        return _csv_rows(path, data)
    if path.suffix == ".json":
        found = _decode(path, 1, data, "file")
        if not isinstance(found, list):
            raise ConfigError(f"{path}: write an array of JSON objects, or one a line into a .jsonl file")
        values = list(enumerate(found, 1))
    else:
        lines = enumerate(data.splitlines(), 1)
        values = [(number, _decode(path, number, line, "line")) for number, line in lines if line.strip()]
    for number, value in values:
        if not isinstance(value, dict):
            raise ConfigError(f'{path}:{number}: a task is a JSON object, as in {{"question": ...}}')
    return values


def _decode(path: Path, number: int, data: bytes, what: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}:{number}: this {what} is not JSON: {error}") from error


def _table_rows(path: Path, key: str) -> list[dict[str, Any]]:
    """Read a table; values that JSON has not, such as times, become text."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"`{key}`: {path.suffix} files need pyarrow: {install_command('data')}") from error
    try:
        if path.suffix == ".arrow":
            with pyarrow.memory_map(str(path)) as source:
                table = pyarrow.ipc.open_stream(source).read_all()
        else:
            table = parquet.read_table(path)
        return [msgspec.to_builtins(row) for row in table.to_pylist()]
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"`{key}`: {path}: {error}") from error


def _csv_rows(path: Path, data: bytes) -> list[tuple[int, dict[str, Any]]]:
    """Read CSV: the first line has the names, and all values are text."""
    try:
        reader = csv.DictReader(io.StringIO(data.decode(), newline=""), strict=True)
        rows = [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: this is not CSV in UTF-8: {error}") from error
    for number, row in rows:
        if None in row or None in row.values():
            raise ConfigError(f"{path}:{number}: this line does not have as many values as the first has names")
    return rows
