"""Leyden trains the language model behind any agent with reinforcement learning, without changing the agent."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Result", "compare", "dev", "evaluate", "export", "reward", "span", "train"]

if TYPE_CHECKING:
    from leyden.client.api import reward, span
    from leyden.client.attempt.result import Result
    from leyden.local.api import compare, dev, evaluate, export, train

_MODULES = {
    "Result": "leyden.client.attempt.result",
    **dict.fromkeys(("reward", "span"), "leyden.client.api"),
    **dict.fromkeys(("compare", "dev", "evaluate", "export", "train"), "leyden.local.api"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that an agent that imports Leyden does not wait for torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'leyden' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
