"""Finds the folder of a run by the run's name, for commands that need its checkpoints (`runs/run_names.py`).

A folder's own store is opened only if the name needs it, because it may be damaged. SQLAlchemy is imported only if a
store is opened: the first line of a command comes before slow imports.
"""

from collections.abc import Collection
from pathlib import Path

from leyden.config import ConfigError
from leyden.runs.run_names import STORE_NAME, may_have, run_folders


def find_run_folder(home: Path, run: str) -> Path | None:
    """Return the folder of the run of a name; None if there is no such run, or it has no folder."""
    for folder in may_have(run_folders(home), run):
        if folder.name == run:
            return folder if run not in _common_ids(home) else None
        if _is_folders_name(folder, run):
            return folder
    return None


def require_run_folder(home: Path, run: str) -> Path:
    """Return the folder of the run of a name; if it has none, raise an error with the runs that have one."""
    if (folder := find_run_folder(home, run)) is not None:
        return folder
    known = ", ".join(folder.name for folder in run_folders(home))
    there = f"; there are {known}" if known else ""
    raise ConfigError(f"there is no run {run!r} with a folder in {home}{there}")


def _common_ids(home: Path) -> Collection[str]:
    if not (home / STORE_NAME).exists():
        return ()
    from leyden.runs.stored_runs import common_ids

    return common_ids(home)


def _is_folders_name(folder: Path, run: str) -> bool:
    from leyden.runs.stored_runs import is_folders_name

    return is_folders_name(folder, run)
