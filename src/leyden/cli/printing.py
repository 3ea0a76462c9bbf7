"""Output on stdout: JSON, or text that is never wrapped inside an id, so that ids can be copied."""

import sys
from collections.abc import Iterable
from typing import Any

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_MIN_WIDTH = 24
"""Minimum width of a column that may be folded."""


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode() + "\n")


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: `1 rollout`, `2 rollouts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_bytes(size: int) -> str:
    """Format a size with a unit."""
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def stdout_console() -> Console:
    """Return a console on stdout; it wraps lines only on a terminal, and colours only what is marked up."""
    return Console(soft_wrap=not sys.stdout.isatty(), highlight=False)


def print_commands(console: Console, commands: Iterable[tuple[str, str]]) -> None:
    """Print commands to go on with, and what each is for."""
    for command, about in commands:
        console.print(f"  {command}   [dim]# {about}[/]", highlight=False, soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table. On a terminal its last column may be folded; the other columns hold ids and numbers."""
    *others, last = table.columns
    for column in others:
        column.no_wrap = True
    last.overflow = "fold"
    if console.soft_wrap:
        _print_unlimited(console, table)
        return
    width = _max_width(console, table)
    last.max_width = _MIN_WIDTH
    table.width = min(width, max(console.width, _max_width(console, table)))
    last.max_width = None
    console.print(table, crop=False)


def _print_unlimited(console: Console, table: Table) -> None:
    """Print without a box and without trailing spaces, because one long cell would pad every row to its length."""
    table.box = None
    table.width = _max_width(console, table)
    with console.capture() as captured:
        console.print(table, crop=False, soft_wrap=False)
    console.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))


def _max_width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(width=sys.maxsize), table).maximum


def format_number(value: float | None) -> str:
    """Format a number that may be missing."""
    return "-" if value is None else f"{value:.3f}"
