"""What the name of a run means: one rule for every command, for the Python interface and for the dashboard.

A run in the store of a home folder itself, or in the database that `--store` or `LEYDEN_STORE` names in its place, is
called by its id there. A run that has a folder in the home folder is called by that folder's name, whatever its id is
in the folder's store: a run that `--restart` moved aside keeps its id, and its folder has another name. Of several runs
in the store, the folder's is the one that has its name, otherwise the one in its configuration. Every other run of a
folder's store, and the folder's own one if the home folder's store has a run of that name, is called FOLDER:ID. So no
two runs of a home folder have the same name, and a name says which folder has its store.
"""

import os
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from leyden.api.fleet import Fleet

STORE_NAME = "leyden.db"
_CONFIG_NAME = "config.toml"


class FolderRuns(Struct, frozen=True):
    """The runs of a store by their names."""

    ids: Mapping[str, str]
    """By name, the id in the store; in the order of the store."""
    own: str | None = None
    """The name of the run whose folder this is, which has its checkpoints; None if it is the folder of a server."""

    def name_of(self, id: str) -> str:
        """Return the name of a run; that of an unknown one is its id."""
        return next((name for name, known in self.ids.items() if known == id), id)


def name_runs(folder: Path | None, ids: Sequence[str], taken: Collection[str] = ()) -> FolderRuns:
    """Name the runs of a store: that of a folder (`taken` are the ids in the home folder's store), or another one."""
    if folder is None:
        return FolderRuns({id: id for id in ids})
    own = own_run(folder, ids)
    names = {id: f"{folder.name}:{id}" for id in ids}
    if own is not None and folder.name not in taken:
        names[own] = folder.name
    of_folder = names[own] if own is not None and is_run_folder(folder) else None
    return FolderRuns({name: id for id, name in names.items()}, of_folder)


def own_run(folder: Path, ids: Sequence[str]) -> str | None:
    """Return the id of the run that a folder is called after, of those in its store; None if there is no such run."""
    if folder.name in ids or not is_run_folder(folder):
        return folder.name if folder.name in ids else None
    configured = _configured_run(folder)
    return configured if configured in ids else ids[0] if len(ids) == 1 else None


def _configured_run(folder: Path) -> str | None:
    """Return the run that the configuration in a folder names; None if it names none or cannot be read."""
    try:
        run = tomllib.loads((folder / _CONFIG_NAME).read_text()).get("run")
    except (OSError, ValueError):
        return None
    return run if isinstance(run, str) else None


def is_run_folder(folder: Path) -> bool:
    """Whether a folder is that of a run, and not, say, the home folder of a server."""
    return (folder / _CONFIG_NAME).is_file()


def run_folders(home: Path) -> list[Path]:
    """Return the folders of runs in a home folder, by name."""
    return [path.parent for path in sorted(home.glob(f"*/{_CONFIG_NAME}"))]


def store_folders(home: Path) -> list[Path]:
    """Return the folders of a home folder that have a store, by name."""
    return [path.parent for path in sorted(home.glob(f"*/{STORE_NAME}"))]


def denied(home: Path, run: str | None = None) -> str | None:
    """Say which folder of a home folder this user may not open: that of a run, or any; None if there is none."""
    folders = sorted(home.iterdir()) if run is None and home.is_dir() else [home / (run or "")]
    closed = next((one for one in folders if one.is_dir() and not os.access(one, os.R_OK | os.X_OK)), None)
    return None if closed is None else f"{closed}: permission denied: the folder is another user's"


def may_have(folders: Iterable[Path], run: str) -> list[Path]:
    """Return those of some folders whose store may have the run of a name."""
    return [folder for folder in folders if run == folder.name or run.startswith(f"{folder.name}:")]


def name_leases(fleet: Fleet, runs: FolderRuns) -> Fleet:
    """Return a fleet whose active attempts have the names of their runs."""
    return replace(fleet, leases=tuple(replace(lease, run=runs.name_of(lease.run)) for lease in fleet.leases))
