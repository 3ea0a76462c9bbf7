"""Loads a user's function that replaces a built-in one, and checks its signature and everything that it returns.

An error names the configuration key and says in one line what the function should return.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from msgspec import Struct

from leyden.config import Config, ConfigError
from leyden.learner.errors import TrainingError
from leyden.rl import registry
from leyden.rl.registry import Kind
from leyden.user_code.loading import LoadError, load_function, one_line, placeholder_keys


class FunctionKind(Struct, frozen=True):
    """How functions under one configuration key are called and checked."""

    parameters: tuple[str, ...]
    """Names of the positional arguments."""
    check: Callable[..., str | None]
    """Takes the returned value and the arguments; returns what is wrong with the value, None if nothing is."""


def load_algorithm(kind: Kind, config: Config, functions: Mapping[str, FunctionKind]) -> Callable[..., Any]:
    """Load the algorithm of a kind that a configuration names; `functions` says how a user's is called, by key."""
    name: str = getattr(config.algorithm, kind)
    if not registry.is_user_function(name):
        return registry.load(kind, name)
    key = f"algorithm.{kind}"
    return load_user_function(key, name, config.base, functions[key])


def load_user_function(key: str, reference: str, base: str, kind: FunctionKind) -> Callable[..., Any]:
    """Load the function that a configuration names under `key`; the result checks every call of it."""
    try:
        with placeholder_keys():
            function = load_function(reference, base)
    except LoadError as error:
        raise ConfigError(f"`{key}`: {error}") from error
    try:
        inspect.signature(function).bind(*kind.parameters)
    except TypeError as error:
        raise ConfigError(f"`{key}`: {reference!r} is called with ({', '.join(kind.parameters)}): {error}") from error
    except ValueError:  # a function written in C has no signature
        pass

    @wraps(function)
    def checked(*arguments: Any) -> Any:
        try:
            value = function(*arguments)
        except Exception as error:
            raise TrainingError(f"`{key}` failed: {one_line(error)}") from error
        if (problem := kind.check(value, *arguments)) is not None:
            raise TrainingError(f"`{key}` returned {problem}")
        return value

    return checked
