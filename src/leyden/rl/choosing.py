"""An algorithm by its name: the function of that name in the file of that name."""

from collections.abc import Callable
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

Room = Literal["credit", "advantage", "loss", "aggregation", "correction"]

OWN = "module:function, or file.py:function"
"""How a user's own is named, which whoever reads a configuration loads."""


class UnknownName(Exception):
    """There is no such algorithm; the message names those there are."""


def choose(room: Room, name: str) -> Callable[..., Any]:
    """The function that a name stands for."""
    if name in names(room):
        return getattr(import_module(f"leyden.rl.{room}.{name}"), name)  # type: ignore[no-any-return]
    there = [*names(room), "none"] if room == "correction" else names(room)
    raise UnknownName(f"`algorithm.{room}`: there is no {name!r}; there are {', '.join(there)}, or {OWN}")


def names(room: Room) -> list[str]:
    """The algorithms of a room."""
    found = (path.name for path in files(f"leyden.rl.{room}").iterdir())
    return sorted(name.removesuffix(".py") for name in found if name.endswith(".py") and not name.startswith("_"))
