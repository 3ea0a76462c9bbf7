"""Fingerprints of the code of an agent and a reward, by which an edit between two starts of a run is noticed.

A fingerprint covers the named function and everything that it uses in its file and in other files of the run's folder.
Comments, docstrings and formatting do not count. For a command, it covers the files that the command names.
"""

import ast
import shlex
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path

from leyden.client.agent_reference import AgentKind, kind_of
from leyden.config import Config

Fingerprint = dict[str, str]
"""Digests by what they are of: `solve in agent.py`, or a file."""


def fingerprint(config: Config) -> Fingerprint:
    """Compute the fingerprint of a run's agent and reward. Installed packages and endpoints have none."""
    base, found = Path(config.base), Fingerprint()
    for reference in filter(None, (config.agent, config.reward)):
        if kind_of(reference, config.base) is AgentKind.PYTHON:
            source, _, name = reference.rpartition(":")
            file = base / source if source.endswith(".py") else _module_file(base, source)
            if file is not None and file.is_file():
                _add_definitions(file, name.partition(".")[0], base, found)
        elif kind_of(reference, config.base) is AgentKind.COMMAND:
            for word in shlex.split(reference):
                if (base / word).is_file():
                    found[word] = _digest((base / word).read_bytes())
    return found


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return what differs between two fingerprints."""
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def _add_definitions(file: Path, name: str, base: Path, found: Fingerprint) -> None:
    """Add the definition of a name at the top level of a file, and those of all names that it uses."""
    try:
        definitions = dict(_definitions(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # loading it says what is wrong
        return
    waiting = [name]
    while waiting:
        name = waiting.pop()
        key = f"`{name}` in {file.relative_to(base) if file.is_relative_to(base) else file.name}"
        node = definitions.get(name)
        if node is None or key in found:
            continue
        found[key] = _digest(ast.dump(_without_docstrings(node)).encode())
        waiting += [used.id for used in ast.walk(node) if isinstance(used, ast.Name)]
        if isinstance(node, ast.ImportFrom) and node.module and (other := _module_file(base, node.module)) is not None:
            original = next((alias.name for alias in node.names if name in (alias.asname, alias.name)), name)
            _add_definitions(other, original, base, found)


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that the statements of a module bind."""
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (part for target in targets for part in ast.walk(target)):
                    if isinstance(name, ast.Name):
                        yield name.id, node


def _without_docstrings(node: ast.stmt) -> ast.stmt:
    for part in ast.walk(node):
        if (
            isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(part) is not None
        ):
            part.body = part.body[1:]
    return node


def _module_file(base: Path, module: str) -> Path | None:
    path = base.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()
