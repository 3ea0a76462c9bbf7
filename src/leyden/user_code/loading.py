"""Loads callables from references such as `module:name`, and creates references to callables.

A reference that cannot be loaded raises `LoadError` with a one-line message.
"""

import ast
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]  # it has no types

from leyden.user_code.pickling import NotPicklable, digest_callable, pickle_callable

AnyCallable = Callable[..., Any]


class LoadError(Exception):
    """A reference that names no usable callable; the message says what to change."""


def load_function(reference: str, base: str) -> AnyCallable:
    """Load a function or callable instance; classes are refused."""
    found = load_callable(reference, base)
    if isinstance(found, type):
        raise LoadError(f"{reference!r} is a class: name a function, or an instance that can be called")
    return found


def is_async(function: AnyCallable) -> bool:
    """Whether a call returns a coroutine: of an async function, or of an object whose `__call__` is async."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


@contextmanager
def placeholder_keys() -> Iterator[None]:
    """Set placeholder API keys during an import.

    The loaded module often creates model clients at import, which need a key even if they are never used.
    """
    missing = [name for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY") if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "placeholder"))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def load_callable(reference: str, base: str) -> AnyCallable:
    """Load what `module:name`, `path/to/file.py:name` or `file.pkl` names. Paths are relative to `base`."""
    if reference.endswith(".pkl"):
        found: Any = _unpickle(Path(base, reference))
    else:
        source, colon, name = reference.rpartition(":")
        if not colon or not source or not name:
            raise _no_name(reference, base)
        if source.endswith(".py"):
            module = _import_file(reference, Path(base, source))
        else:
            module = _import_module(reference, source, base)
        found = _attribute(reference, module, name)
    if not callable(found):
        raise LoadError(f"{reference!r} is a {type(found).__name__}, which is not callable")
    return cast(AnyCallable, found)


def _no_name(reference: str, base: str) -> LoadError:
    if reference.endswith(".py"):
        file = Path(base, reference)
        if not file.is_file():
            return LoadError(f"{reference!r}: there is no file {file.resolve()}")
        return LoadError(f"{reference!r} is a file: to use a function of it, write {reference}:NAME")
    return LoadError(
        f"{reference!r} does not name a callable: write module:name or path/to/file.py:name "
        "(or, for an agent, an existing command)"
    )


def check_reference(reference: str, base: str) -> None:
    """Raise `LoadError` if a reference names a file, module or name that does not exist, without importing it.

    Names that code creates when it is imported are not known here: only a module that creates none is searched.
    """
    source, colon, name = reference.rpartition(":")
    if reference.endswith(".pkl"):
        return
    if not colon or not source or not name:
        raise _no_name(reference, base)
    path = Path(base, source)
    if not source.endswith(".py"):
        if source in sys.modules:
            return
        package = source.partition(".")[0]
        found = importlib.machinery.PathFinder.find_spec(package, [str(Path(base).resolve()), *sys.path])
        if found is None and package not in sys.builtin_module_names:
            raise LoadError(f"{reference!r}: there is no module {package!r} in {base} or on the path")
        if found is None or found.origin is None or not found.origin.endswith(".py") or source != package:
            return
        path = Path(found.origin)
    if not path.is_file():
        raise LoadError(f"{reference!r}: there is no file {path.resolve()}")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        raise LoadError(f"{reference!r} cannot be imported: {type(error).__name__}: {error}") from error
    names = _top_level_names(tree)
    first = name.partition(".")[0]
    if names is not None and first not in names:
        raise LoadError(f"{reference!r}: {path.stem} has no {first!r}{_nearest(first, names)}")


def missing_packages(reference: str, base: str) -> list[str]:
    """Return the packages that the file of a reference imports at its top level and that are not installed here."""
    path = Path(base, reference.rpartition(":")[0])
    if path.suffix != ".py" or b"sys.path" in (text := path.read_bytes()):
        return []
    names: list[str] = []
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    beside = [str(path.parent.resolve())]
    packages = [one for one in dict.fromkeys(name.partition(".")[0] for name in names) if one not in sys.modules]
    elsewhere = [one for one in packages if importlib.machinery.PathFinder.find_spec(one, beside) is None]
    return [one for one in elsewhere if importlib.util.find_spec(one) is None]


def _likely_agent(file: Path) -> str | None:
    """Return the function of a Python file that is most likely the agent: `solve`, or else the first one."""
    if file.suffix != ".py":
        return None
    try:
        body = ast.parse(file.read_bytes(), str(file)).body
    except (SyntaxError, ValueError):
        return None
    names = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return "solve" if "solve" in names else next(iter(names), None)


def _top_level_names(tree: ast.Module) -> set[str] | None:
    """Return the names that a module binds; None if some may be bound in a way that the text does not show."""
    names: set[str] = set()
    for node in ast.walk(tree):
        names |= _names_bound_by(node)
    dynamic = names & {"*", "__getattr__"} or any(
        isinstance(node, ast.Name) and node.id in ("globals", "setattr", "exec") for node in ast.walk(tree)
    )
    return None if dynamic else names


def _names_bound_by(node: ast.AST) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()


def _nearest(name: str, names: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, [one for one in names if not one.startswith("_")], n=1)
    return f": did you mean {matches[0]!r}?" if matches else ""


def reference_to(target: AnyCallable, folder: str) -> str:
    """Return a reference from which another process can load this callable.

    A callable that cannot be imported by name is pickled into `folder`.
    """
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module and name and module != "__main__" and _import_by_name(module, name) is target:
        return f"{module}:{name}"
    try:
        data = pickle_callable(target)
    except NotPicklable as error:
        raise LoadError(f"{error}, or move {name or 'it'} into its own module") from None
    label = getattr(target, "__name__", "callable").strip("<>")
    path = Path(folder).resolve() / f"{label}-{digest_callable(target)}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def _import_by_name(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _unpickle(path: Path) -> Any:
    try:
        return cloudpickle.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise LoadError(f"there is no file {path}") from error
    except Exception as error:
        raise LoadError(f"{path} cannot be unpickled: {one_line(error)}") from error


def _import_file(reference: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise LoadError(f"{reference!r}: there is no file {path}")
    _add_path(str(path.parent))
    name = path.stem
    if not name.isidentifier() or _file_of(name) not in (None, str(path)):  # another module has this name
        name = f"leyden_agent_{name}"
    if _file_of(name) == str(path):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _import_failed(reference, error) from error
    return module


def _file_of(module: str) -> str | None:
    """Return the file of an imported module, "" if it has none; None if it is not imported."""
    return (getattr(sys.modules[module], "__file__", None) or "") if module in sys.modules else None


def _import_module(reference: str, name: str, base: str) -> ModuleType:
    _add_path(str(Path(base).resolve()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise LoadError(f"{reference!r}: there is no module {error.name!r} in {base} or on the path") from error
        raise _import_failed(reference, error) from error
    except BaseException as error:
        raise _import_failed(reference, error) from error


def _attribute(reference: str, module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            hint = _nearest(part, dir(found))
            raise LoadError(f"{reference!r}: {getattr(found, '__name__', 'the object')} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def _import_failed(reference: str, error: BaseException) -> LoadError:
    return LoadError(f"{reference!r} cannot be imported: {one_line(error)}")


def one_line(error: BaseException) -> str:
    """Format an error in one line, with the file and line where it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames and len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}".replace("\n", " ")


def add_current_folder() -> None:
    """Let user code import modules of the current folder, before others, as `python -m` does.

    A process that starts with `-P` calls it after its own imports, so that a file of the user, such as `queue.py`,
    does not replace a module that Leyden needs to start.
    """
    with suppress(FileNotFoundError):  # the folder was removed
        _add_path(str(Path.cwd()))


def _add_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


class AgentKind(Enum):
    """The kind of an agent, which decides how it is run."""

    PYTHON = "a function or a class"
    COMMAND = "a command"
    ENDPOINT = "an HTTP endpoint"


def kind_of(reference: str, base: str) -> AgentKind:
    """Determine the kind from the form of the reference and the files in the folder `base`."""
    if reference.startswith(("http://", "https://")):
        return AgentKind.ENDPOINT
    file = reference.rpartition(":")[0] or reference
    if reference.endswith(".pkl") or (file.endswith(".py") and ":" in reference and Path(base, file).is_file()):
        return AgentKind.PYTHON  # a path may contain spaces
    if len(reference.split()) > 1:
        return AgentKind.COMMAND
    if ":" not in reference and (Path(base, reference).is_file() or shutil.which(reference)):
        return AgentKind.COMMAND
    return AgentKind.PYTHON


def read_command(reference: str, base: str) -> list[str]:
    """Split a command as a shell does. The program is searched in `base`, then on PATH."""
    try:
        program, *arguments = shlex.split(reference)
    except ValueError as error:
        raise LoadError(f"the command {reference!r} cannot be read: {error}") from error
    local = Path(base, program).absolute()  # not resolved: the python of a virtual environment is a symlink
    if local.is_file():
        if not os.access(local, os.X_OK):
            if function := _likely_agent(local):
                raise LoadError(f"{program!r} is a file: to use a function of it, write {program}:{function}")
            raise LoadError(f"{program!r} is not executable: chmod +x it, or write its interpreter before it")
        return [str(local), *arguments]
    found = shutil.which(program) if "/" not in program else None
    if found is None:
        raise LoadError(f"the command {reference!r} cannot be run: there is no {program!r} in {base} or on PATH")
    return [found, *arguments]
