"""From a reference, as a person writes it, to a callable, and back. What cannot be loaded is said in one line."""

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle  # type: ignore[import-untyped]

AnyCallable = Callable[..., Any]


class LoadError(Exception):
    """A reference that leads to nothing callable; the message says what to change."""


def load(reference: str, base: str) -> AnyCallable:
    """The callable that a reference names, which is no class."""
    found = find(reference, base)
    if isinstance(found, type):
        raise LoadError(f"{reference!r} is a class: name a function, or an instance that can be called")
    return found


@contextmanager
def stand_in_keys() -> Iterator[None]:
    """What is loaded often lives beside an agent, whose clients want a key when they are made; here none is used."""
    missing = [name for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY") if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, "no-key-here"))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def find(reference: str, base: str) -> AnyCallable:
    """What `module:name`, `path/to/file.py:name` or `file.pkl` names; paths are relative to `base`."""
    if reference.endswith(".pkl"):
        found: Any = _unpickle(Path(base, reference))
    else:
        place, colon, name = reference.rpartition(":")
        if not colon or not place or not name:
            raise LoadError(
                f"{reference!r} names no callable: write module:name or path/to/file.py:name "
                "(or, for an agent, a command that is there)"
            )
        module = _from_file(reference, Path(base, place)) if place.endswith(".py") else _module(reference, place, base)
        found = _attribute(reference, module, name)
    if not callable(found):
        raise LoadError(f"{reference!r} is a {type(found).__name__}, and cannot be called")
    return cast(AnyCallable, found)


def refer(target: AnyCallable, folder: str) -> str:
    """A reference under which another process finds this callable, pickling it into `folder` where it has no name."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module and name and module != "__main__" and _named(module, name) is target:
        return f"{module}:{name}"
    try:
        data = cloudpickle.dumps(target)
    except Exception as error:
        raise LoadError(
            f"{name or target!r} cannot be sent to another process ({error}): move it into a module of its own, "
            "or make inside it what it uses"
        ) from error
    label = getattr(target, "__name__", "callable").strip("<>")
    path = Path(folder).resolve() / f"{label}-{blake2b(data, digest_size=6).hexdigest()}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return str(path)


def _named(module: str, name: str) -> Any:
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
        raise LoadError(f"{path} cannot be unpickled: {last_line(error)}") from error


def _from_file(reference: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise LoadError(f"{reference!r}: there is no file {path}")
    _add_path(str(path.parent))
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None or not name.isidentifier():  # a name that something else has: keep both
        name = f"leyden_agent_{name}"
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


def _module(reference: str, name: str, base: str) -> ModuleType:
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
            near = difflib.get_close_matches(part, [n for n in dir(found) if not n.startswith("_")], n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise LoadError(f"{reference!r}: {getattr(found, '__name__', 'it')} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def _import_failed(reference: str, error: BaseException) -> LoadError:
    return LoadError(f"{reference!r} cannot be imported: {last_line(error)}")


def last_line(error: BaseException) -> str:
    """The error and where in the user's code it was raised."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames and len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}".replace("\n", " ")


def _add_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
