"""What a sandbox sees of the machine's files, as options of bubblewrap.

It sees the system, the interpreter, folders of Python modules, the agent's folder and what the configuration names.
Hidden files and folders are empty by whichever path they would be seen; what the configuration names inside of a hidden
folder is seen. Keys of Leyden are looked for in what it would see.
"""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

from leyden.api.wire import KEY_PREFIX
from leyden.client.isolation.options import IsolationOptions, SandboxUnavailable

SCRATCH = "/tmp"
SOCKETS = "/run/leyden"
EMPTY_FILE = "empty"
"""A file without content in the folder of the forwarder's sockets, which takes the place of hidden files."""
_SHARED_MEMORY = "/dev/shm"
_MAX_SCRATCH = 4 << 30
_SYSTEM = [*map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix", "/gnu"))]


def file_options(options: IsolationOptions, program: str) -> list[str]:
    """Return the options of bubblewrap for the files that a program sees."""
    base = Path(options.base)
    if not _is_specific(base):
        raise SandboxUnavailable(f"the agent's folder is {base}: move the agent into a folder of its own")
    hidden = [Path(each).resolve() for each in options.hidden]
    if base.resolve() in hidden:
        raise SandboxUnavailable(f"the agent's folder is {base}, which also holds the runs: set `home` to another")
    shown = _shown(options, program)
    masks = set(_masks(hidden, [*(path for path in _SYSTEM if not path.is_symlink()), *shown]))
    words = [*_system(options)]
    for path in sorted({*shown, *masks}):  # what is inside another comes after it
        if path in masks and _mount_of(path.parent, shown, masks) in masks:
            continue  # it is not there
        words += _folders_around(path, shown, masks)
        if path not in masks:
            words += [shown[path], str(path), str(path)]
        elif path.is_dir():
            words += ["--perms", "0755", "--tmpfs", str(path)]
        else:
            words += ["--ro-bind", str(Path(options.sockets, EMPTY_FILE)), str(path)]
    for path in sorted(masks):
        words += ["--remount-ro", str(path)] if path.is_dir() else []
    return words


def _system(options: IsolationOptions) -> Iterator[str]:
    for path in _SYSTEM:
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    yield from ("--proc", "/proc", "--dev", "/dev")
    size = _MAX_SCRATCH if options.memory_mb is None else min(_MAX_SCRATCH, options.memory_mb << 20)
    for folder in (_SHARED_MEMORY, SCRATCH):  # the memory of both is counted with that of the processes, too
        yield from ("--perms", "1777", "--size", str(size), "--tmpfs", folder)
    yield from ("--perms", "0755", "--dir", str(Path(SOCKETS).parent))


def _shown(options: IsolationOptions, program: str) -> dict[Path, str]:
    """Return what is shown besides the system, and how it is bound."""
    modules = filter(_is_specific, map(Path, filter(None, (*sys.path, *options.path))))
    visible = [*_interpreter(), *modules, Path(options.base).absolute(), *_program_folders(program)]
    found = {path: "--ro-bind" for path in visible if os.access(path, os.R_OK) and not _is_within(path, _SYSTEM)}
    found |= {Path(options.base, each): "--ro-bind" for each in options.workers.readable}
    return found | {Path(options.base, each): "--bind" for each in options.workers.writable}


def _masks(hidden: Collection[Path], shown: Iterable[Path]) -> Iterator[Path]:
    """Yield every path by which something hidden would be seen."""
    for path in shown:
        source = path.resolve()
        yield from (path / each.relative_to(source) for each in hidden if each.exists() and each.is_relative_to(source))


def _folders_around(path: Path, shown: Collection[Path], masks: Collection[Path]) -> Iterator[str]:
    """Yield options that create the folders around a path, which bubblewrap would create for root only."""
    for folder in reversed(path.parents[:-1]):
        mount = _mount_of(folder, shown, masks)
        if mount is None or (mount in masks and mount != folder):
            yield from ("--perms", "0755", "--dir", str(folder))


def _mount_of(path: Path, shown: Collection[Path], masks: Collection[Path]) -> Path | None:
    """Return what a path is inside of in the sandbox; None: its root or a scratch folder."""
    return next((each for each in (path, *path.parents) if each in masks or each in shown or each in _SYSTEM), None)


def _interpreter() -> list[Path]:
    """Return the folders of this Python and of Leyden."""
    installed = Path(sys.executable).resolve().parents[1]
    return [Path(sys.base_prefix), Path(sys.prefix), installed, Path(__file__).parents[2]]


def _program_folders(program: str) -> list[Path]:
    """Return the folder of a program and, if it is a link, of what it points to."""
    found = shutil.which(program)
    return [] if found is None else [Path(found).absolute().parent, Path(found).resolve().parent]


def _is_specific(folder: Path) -> bool:
    """Whether a folder is neither the home folder, nor around it, nor that of all temporary files: not to be shown."""
    return not Path.home().is_relative_to(folder.absolute()) and folder.absolute() != Path(tempfile.gettempdir())


def _is_within(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.absolute().is_relative_to(folder) for folder in folders)


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
