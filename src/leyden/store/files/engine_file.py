"""The file in a server's home folder that says what its engines do, for pages of other servers and `leyden top`."""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from leyden.api.fleet import EngineReport

_FILE = "engines.json"
_STALE_S = 30.0
"""A file that is older is of a server that was killed."""


def write_report(home: Path, report: EngineReport) -> None:
    """Replace the report; a reader sees the old one or the new one."""
    draft = home / f"{_FILE}.draft"
    draft.write_bytes(msgspec.json.encode(report))
    draft.replace(home / _FILE)


def remove_report(home: Path) -> None:
    """Remove the report: the server ends."""
    (home / _FILE).unlink(missing_ok=True)


def read_report(home: Path) -> EngineReport | None:
    """Return the report of the server that runs in a home folder; None if none runs or it serves no model."""
    try:
        report = msgspec.json.decode((home / _FILE).read_bytes(), type=EngineReport)
    except (OSError, msgspec.DecodeError):
        return None
    if time.time() - report.at > _STALE_S:
        return None
    return replace(report, engines=tuple(replace(one, run=home.name) for one in report.engines))


def read_reports(homes: Iterable[Path]) -> list[EngineReport]:
    """Return the reports of the servers that run in some home folders."""
    return [report for home in homes if (report := read_report(home)) is not None]
