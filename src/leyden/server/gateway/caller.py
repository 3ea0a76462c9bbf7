"""Who is calling. Authority comes from the key, identity from the context.

An attempt's own key says both. A pool's key needs W3C trace context or baggage to say which of its attempts is calling;
a call without a known context is refused, and counted.
"""

import re
from collections.abc import Mapping
from urllib.parse import unquote

from msgspec import Struct

from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.keys import Key, KeyRefused, speak_for
from leyden.server.leases import ActiveLeases
from leyden.store.queue import ActiveLease

_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:@~/+-]{0,159}").fullmatch
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}.*").fullmatch


class Caller(Struct, frozen=True):
    """Who asks: an attempt, and in which role."""

    live: ActiveLease
    role: str | None = None
    span: str | None = None
    """The span within which it asks."""
    retry: bool = False
    """Whether its SDK says that it is trying the same again."""


def identify(leases: ActiveLeases, key: Key, headers: Mapping[str, str], role: str | None) -> Caller:
    """The caller of a request; `role` is the one in its path."""
    trace = _TRACEPARENT(headers.get("traceparent", "").strip())
    named = key.attempt or _baggage(headers.get("baggage", ""))
    live = leases.find(named) if named else leases.traced(trace[1]) if trace else None
    if live is None:
        message = "which rollout is calling? Send its own key, or the trace context or baggage that it was given"
        raise KeyRefused(403, "no_context", message)
    if key.run not in (None, live.run):
        raise KeyRefused(403, "not_permitted", f"this key is for run {key.run}, not {live.run}")
    speak_for(key, leases, live.attempt)
    role = role or headers.get("x-leyden-role")
    if role is not None and not _ROLE(role):
        raise GatewayError(ErrorKind.INVALID, "a role is a short name", "x-leyden-role")
    retry = headers.get("x-stainless-retry-count", "0") != "0"
    return Caller(live, role, trace[2] if trace else None, retry)


def _baggage(header: str) -> str | None:
    for member in header.split(","):
        name, _, value = member.partition("=")
        if name.strip() == "leyden.attempt":
            return unquote(value.partition(";")[0].strip())
    return None
