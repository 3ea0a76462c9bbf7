"""Pickles callables that cannot be imported by name, such as those of a notebook, so that other processes can run them.

Model clients are not carried but created anew, from the environment of the process that loads them. What cannot be
carried is reported by the name of its variable.
"""

import importlib
import inspect
import io
from collections.abc import Callable, Iterator
from hashlib import blake2b
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it has no types

_CLIENT_PACKAGES = ("openai", "anthropic")


class NotPicklable(Exception):
    """A callable that cannot be carried; the message names the variable."""


def pickle_callable(target: Callable[..., Any]) -> bytes:
    """Pickle a callable with all that it uses; raise `NotPicklable` with the names of what cannot be carried."""
    try:
        return _dumps(target)
    except Exception as error:
        culprits = list(dict.fromkeys(_culprits(target, set())))
        name = getattr(target, "__name__", repr(target))
        if not culprits:
            raise NotPicklable(f"{name} cannot be sent to another process ({error})") from None
        raise NotPicklable(
            f"{name} uses {', '.join(culprits)}, which cannot be sent to another process: create it inside the function"
        ) from None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def reducer_override(self, value: Any) -> Any:
        if _is_client(value):
            kind = type(value)
            return new_client, (kind.__module__.partition(".")[0], kind.__name__, _client_options(value))
        return super().reducer_override(value)


def new_client(package: str, name: str, options: dict[str, Any]) -> Any:
    """Create a model client: its address and its key come from the environment."""
    return getattr(importlib.import_module(package), name)(**options)


def _is_client(value: Any) -> bool:
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package not in _CLIENT_PACKAGES or not hasattr(value, "api_key"):
        return False
    return getattr(importlib.import_module(package), kind.__name__, None) is kind


def _client_options(client: Any) -> dict[str, Any]:
    """Return the settings of a client that do not say where it connects."""
    options: dict[str, Any] = {"max_retries": client.max_retries}
    if isinstance(client.timeout, int | float):
        options["timeout"] = client.timeout
    return options


def digest_callable(target: Callable[..., Any]) -> str:
    """Return a digest of a callable that pickles, and of what it uses. File and line of the code do not count.

    The file of a notebook's cell is named after the kernel's process, so a run could not be resumed after a restart.
    """
    return blake2b(_dumps(target, _DigestPickler), digest_size=6).hexdigest()


class _DigestPickler(_Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, CodeType):
            names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
            counts = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
            constants = [sorted(map(repr, one)) if isinstance(one, frozenset) else one for one in value.co_consts]
            return tuple, ((value.co_code, constants, names, counts),)
        return super().reducer_override(value)


def _dumps(value: Any, pickler: type[_Pickler] = _Pickler) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer).dump(value)
    return buffer.getvalue()


def _culprits(target: Any, seen: set[int]) -> Iterator[str]:
    """Yield the variables of a function and of those that it calls that cannot be pickled, with their types."""
    if not isinstance(target, FunctionType) or id(target) in seen:
        return
    seen.add(id(target))
    used = inspect.getclosurevars(target)
    for name, value in {**used.globals, **used.nonlocals}.items():
        if isinstance(value, ModuleType):
            continue
        try:
            _dumps(value)
        except Exception:  # of many kinds
            inner = list(_culprits(value, seen))
            yield from inner or [f"`{name}` ({type(value).__module__}.{type(value).__qualname__})"]
