"""Reads the rows of a file of tasks: JSON objects, one a line or in an array, or CSV with a header.

Each row has the number of its line, or of its place in the array. A byte order mark at the beginning is skipped.
"""

import csv
import io
from pathlib import Path
from typing import Any

import msgspec

from leyden.config import ConfigError


def read_rows(path: Path, key: str) -> list[tuple[int, dict[str, Any]]]:
    """Read the rows of a file; `key` is the configuration key that names it, for errors."""
    try:
        data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ConfigError(f"`{key}`: {path}: {error.strerror}") from error
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
