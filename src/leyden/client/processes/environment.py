"""Environment variables of processes that run agents: where the model is, without the worker's secrets."""

import os
from urllib.parse import urlsplit

from leyden.config.schema import UPSTREAM_KEY_VARIABLE

KEY_VARIABLE = "LEYDEN_KEY"
"""Holds a worker's own key, which no host process inherits, or the key of a command's attempt."""


def without_secrets() -> dict[str, str]:
    """Return the variables of this process without the keys that agents must not see."""
    return {name: value for name, value in os.environ.items() if name not in (KEY_VARIABLE, UPSTREAM_KEY_VARIABLE)}


def agent_environment(server: str, key: str) -> dict[str, str]:
    """Return the worker's variables without its secrets, and those that direct client libraries to the model."""
    inherited = without_secrets()
    no_proxy = inherited.get("NO_PROXY") or inherited.get("no_proxy")
    no_proxy = ",".join(filter(None, (no_proxy, urlsplit(server).hostname)))
    return {
        **inherited,
        "OPENAI_BASE_URL": f"{server}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": server,
        "ANTHROPIC_API_KEY": key,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",  # output is complete even if the process is killed
    }
