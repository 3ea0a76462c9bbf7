"""Applies the rules of a run to a call: which target its model name is routed to, and which role its prompt shows.

Agents choose model names and prompts, so that both are matched in linear time.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from leyden.patterns import applies
from leyden.records import FixedAnswer
from leyden.server.gateway.dialects.types import Message


def route_target(model: str, routes: Mapping[str, str | FixedAnswer]) -> str | FixedAnswer | None:
    """Return the target of a model's route: the one of that name, else the first whose `*` matches, else None."""
    if model in routes:
        return routes[model]
    return next((target for name, target in routes.items() if "*" in name and _covers(name, model)), None)


def role_by_prompt(messages: Sequence[Message], rules: Mapping[str, str]) -> str | None:
    """Return the first role whose rule matches the system prompt."""
    if not rules:
        return None
    system = "\n".join(message["content"] for message in messages if message["role"] == "system")
    return next((role for role, rule in rules.items() if applies(rule, system)), None)


def _covers(pattern: str, name: str) -> bool:
    """Whether a name is the pattern with any texts for its stars. `fnmatch` looks for each part once."""
    return fnmatchcase(name, re.sub(r"[?\[]", r"[\g<0>]", pattern))
