"""What commands print on stdout: JSON, or text that is as wide as it has to be, so that ids in it can be copied."""

import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_NARROWEST = 24
"""Of a column that may be folded."""


def print_json(value: Any) -> None:
    """Print a value as JSON for people, too."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode() + "\n")


def console_of_stdout() -> Console:
    """A console; where it is no terminal, nothing is wrapped."""
    return Console(soft_wrap=not sys.stdout.isatty())


def print_table(console: Console, table: Table) -> None:
    """Print a table. Only its last column is folded, and only for a terminal: the others hold ids and numbers."""
    *whole, last = table.columns
    for column in whole:
        column.no_wrap = True
    last.overflow = "fold"
    if console.soft_wrap:
        _print_unlimited(console, table)
        return
    width = _widest(console, table)
    last.max_width = _NARROWEST
    table.width = min(width, max(console.width, _widest(console, table)))
    last.max_width = None
    console.print(table, crop=False)


def _print_unlimited(console: Console, table: Table) -> None:
    """Without a frame, nor anything after the last word of a row: one long cell would make every row as long."""
    table.box = None
    table.width = _widest(console, table)
    with console.capture() as captured:
        console.print(table, crop=False, soft_wrap=False)
    console.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))


def _widest(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(width=sys.maxsize), table).maximum
