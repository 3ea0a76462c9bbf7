"""An algorithm by its name: the function of that name in the file of that name, or a user's `module:function`."""

from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

Room = Literal["credit", "advantage", "loss", "aggregation", "correction"]


class Unknown(Exception):
    """There is no such algorithm; the message names those there are."""


def choose(room: Room, name: str) -> Callable[..., Any]:
    """The function that a name stands for."""
    if ":" in name:
        return imported(f"algorithm.{room}", name)
    if name in names(room):
        return getattr(import_module(f"leyden.rl.{room}.{name}"), name)  # type: ignore[no-any-return]
    raise Unknown(f"`algorithm.{room}`: there is no {name!r}; there are {', '.join(names(room))}, or module:function")


def imported(key: str, name: str) -> Callable[..., Any]:
    """A user's function by its `module:function`; `key` is where the configuration names it."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, ValueError) as error:
        raise Unknown(f"`{key}`: {name!r} cannot be imported: {error}") from error


def names(room: Room) -> list[str]:
    """The algorithms of a room."""
    found = (path.name for path in files(f"leyden.rl.{room}").iterdir())
    return sorted(name.removesuffix(".py") for name in found if name.endswith(".py") and not name.startswith("_"))
