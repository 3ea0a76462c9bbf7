"""Leyden trains the language model behind any agent with reinforcement learning, without changing the agent."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Result", "evaluate", "reward", "span", "train"]

if TYPE_CHECKING:
    from leyden.client.api import reward, span
    from leyden.client.attempt.result import Result
    from leyden.local.api import evaluate, train


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that an agent that imports Leyden does not wait for torch."""
    if name == "Result":
        from leyden.client.attempt.result import Result

        return Result
    if name in ("reward", "span"):
        from leyden.client import api as client_api

        return getattr(client_api, name)
    if name in ("evaluate", "train"):
        from leyden.local import api as local_api

        return getattr(local_api, name)
    raise AttributeError(f"module 'leyden' has no attribute {name!r}")
