"""The environment variables of processes that run agents: where the model is, and none of the worker's secrets."""

import os
from urllib.parse import urlsplit

from leyden.config.schema import UPSTREAM_KEY_VARIABLE

KEY_VARIABLE = "LEYDEN_KEY"
"""Where a worker finds its own key; no host ever does."""


def without_secrets() -> dict[str, str]:
    """This process's variables, but for keys that are not for agents."""
    return {name: value for name, value in os.environ.items() if name not in (KEY_VARIABLE, UPSTREAM_KEY_VARIABLE)}


def environment(server: str, key: str) -> dict[str, str]:
    """The variables by which the clients of an agent find the model, beside those of the worker."""
    inherited = without_secrets()
    direct = ",".join(filter(None, (inherited.get("NO_PROXY") or inherited.get("no_proxy"), urlsplit(server).hostname)))
    return {
        **inherited,
        "OPENAI_BASE_URL": f"{server}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": server,
        "ANTHROPIC_API_KEY": key,
        "NO_PROXY": direct,
        "no_proxy": direct,
        "PYTHONUNBUFFERED": "1",  # what an agent printed is there even if its process is killed
    }
