"""Fingerprints of agent, reward and tasks, by which an edit between two starts of a run is noticed.

A fingerprint covers the named function and everything that it uses in its file and in other files of the run's folder.
Comments, docstrings and formatting do not count. For a command, it covers the files that the command names. Task files
are covered whole: with other tasks, held-out ones may have been trained on.
"""

import ast
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b, file_digest
from pathlib import Path

from leyden.config import Config
from leyden.user_code.agent_reference import AgentKind, kind_of

Fingerprint = dict[str, str]
"""Digests by what they are of: `` `solve` in agent.py ``, or a file."""


def fingerprint(config: Config) -> Fingerprint:
    """Compute the fingerprint of a run's agent, reward and task files.

    Installed packages and endpoints have none, and functions of a notebook have a digest in the name of their file.
    """
    base, found = Path(config.base), Fingerprint()
    for reference in filter(None, (config.agent, config.reward)):
        if reference.endswith(".pkl"):
            continue
        if kind_of(reference, config.base) is AgentKind.PYTHON:
            source, _, name = reference.rpartition(":")
            file = base / source if source.endswith(".py") else _module_file(source, (base,))
            if file is not None and file.is_file():
                builder = _FingerprintBuilder(base, (file.parent, base) if source.endswith(".py") else (base,), found)
                builder.add(file, [name.partition(".")[0]])
        elif kind_of(reference, config.base) is AgentKind.COMMAND:
            for word in shlex.split(reference):
                if (base / word).is_file():
                    found[word] = _file_digest(base / word)
    for tasks in (config.tasks, config.held_out, config.test):
        if isinstance(tasks, str) and (base / tasks).is_file():
            found[tasks] = _file_digest(base / tasks)
    return found


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between two fingerprints.

    What only the later one has is no edit by itself: what begins to use it has changed too, unless it is the
    fingerprint that covers more than that of an earlier Leyden.
    """
    if all(now.get(name) == digest for name, digest in before.items()):
        return []
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


class _FingerprintBuilder:
    """Adds definitions to a fingerprint. `folders` are those in which Python finds the modules of the run."""

    def __init__(self, base: Path, folders: Sequence[Path], found: Fingerprint) -> None:
        self._base, self._folders, self._found = base, folders, found

    def add(self, file: Path, names: Iterable[str] | None = None) -> None:
        """Add the definitions of some names at the top level of a file (None: of all), and of what they use."""
        try:
            definitions = _definitions(ast.parse(file.read_bytes()))
        except (SyntaxError, ValueError):  # loading it says what is wrong
            return
        waiting = [*(definitions if names is None else names), "*"]  # whatever an import of `*` brings may be used
        while waiting:
            name = waiting.pop()
            key = f"`{name}` in {file.relative_to(self._base) if file.is_relative_to(self._base) else file.name}"
            if name not in definitions or key in self._found:
                continue
            nodes = definitions[name]
            self._found[key] = _digest("".join(ast.dump(_without_docstrings(node)) for node in nodes).encode())
            for part in (part for node in nodes for part in ast.walk(node)):
                if isinstance(part, ast.Name):
                    waiting.append(part.id)
                elif isinstance(part, ast.Import | ast.ImportFrom):
                    for alias in part.names:
                        if part not in nodes or name == _bound_name(part, alias):
                            self._add_imported(file, part, alias.name)

    def _add_imported(self, file: Path, node: ast.Import | ast.ImportFrom, name: str) -> None:
        """Add a module that is imported, or what is imported from one."""
        if isinstance(node, ast.Import):
            if (module := _module_file(name, self._folders)) is not None:
                self.add(module)
            return
        folders = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else self._folders
        if (module := _module_file(f"{node.module}.{name}" if node.module else name, folders)) is not None:
            self.add(module)
        elif node.module and (module := _module_file(node.module, folders)) is not None:
            self.add(module, None if name == "*" else [name])


def _definitions(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Return, for each name that a module binds, the statements at its top level that bind or change it."""
    found: dict[str, list[ast.stmt]] = {}
    for node in tree.body:
        is_block = isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While) and not _is_main(node)
        for name in dict.fromkeys(name for part in (ast.walk(node) if is_block else (node,)) for name in _bound(part)):
            found.setdefault(name, []).append(node)
    return found


def _is_main(node: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__":`, which does not run in a worker."""
    return isinstance(node, ast.If) and "__name__" in {p.id for p in ast.walk(node.test) if isinstance(p, ast.Name)}


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement binds, or whose objects it changes: `a.b = 1` changes `a`."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Import() | ast.ImportFrom():
            yield from (_bound_name(node, alias) for alias in node.names)
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


def _bound_name(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """Return the name that an import binds: `import a.b` binds `a`."""
    name = alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name
    return alias.asname or name


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for part in ast.walk(node):
        if (
            isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(part) is not None
        ):
            part.body = part.body[1:]
    return node


def _module_file(module: str, folders: Iterable[Path]) -> Path | None:
    paths = (folder.joinpath(*module.split(".")) for folder in folders)
    files = (file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
