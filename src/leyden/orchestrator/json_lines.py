"""Files of JSON objects, one a line, that a process may be killed while it writes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file, of none if there is no such file. A line that a crash cut short is skipped."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Remove the other lines, and one that was cut short."""
    kept = [line for line in read_lines(path) if keep(line)]
    temporary = path.with_suffix(".draft")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line, or nothing if the disk has no room for it."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            data = f"{json.dumps(line)}\n".encode()
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise
