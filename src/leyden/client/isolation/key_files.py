"""Finds keys of Leyden in folders that agents may see, so that they can be hidden."""

import os
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from leyden.api.wire import KEY_PREFIX

_MAX_DEPTH = 5
"""Folders below a folder in which keys are looked for: `runs/NAME/admin.key` is in the second."""
_MAX_FOLDERS = 20_000
_SKIPPED = frozenset((".git", ".venv", "node_modules", "__pycache__", "site-packages"))


def find_key_files(folders: Iterable[str]) -> Iterator[str]:
    """Yield the keys in these folders, and the secrets of servers beside their keys. Links are not followed."""
    for folder in dict.fromkeys(Path(each).resolve() for each in folders):
        for path, names, files in islice(os.walk(folder), _MAX_FOLDERS):
            depth = len(Path(path).relative_to(folder).parts)
            names[:] = [name for name in names if name not in _SKIPPED] if depth < _MAX_DEPTH else []
            keys = [name for name in files if name.endswith(".key") and _is_key(Path(path, name))]
            secrets = ["secret"] if "secret" in files and "admin.key" in keys else []
            yield from (str(Path(path, name)) for name in (*keys, *secrets))


def is_public(path: Path) -> bool:
    """Whether every user can read a file, if it is one."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) and bool(mode & stat.S_IROTH)


def _is_key(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(KEY_PREFIX)) == KEY_PREFIX.encode()
    except OSError:
        return False
