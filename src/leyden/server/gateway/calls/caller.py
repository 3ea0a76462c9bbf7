"""Identifies the attempt that makes a model call. Authority comes from the key, identity from the context.

An attempt's key identifies it. With a pool's key, W3C trace context or baggage says which attempt of the pool is
calling; a call without a known context is refused and counted.
"""

import math
import re
import secrets
import time
from collections.abc import Mapping
from urllib.parse import unquote

from msgspec import Struct

from leyden.records import Attempt
from leyden.server.control.keys import ActiveLeases, Key, KeyKind, KeyRefused, check_attempt
from leyden.server.gateway.errors import invalid

_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:@~/+-]{0,159}").fullmatch
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}.*").fullmatch


class Caller(Struct, frozen=True):
    """The attempt that makes a call, and the role it makes it in."""

    attempt: Attempt
    role: str | None = None
    span: str | None = None
    """The span in which the call is made."""
    retry: bool = False
    """Whether the SDK marks the request as a retry."""
    direct: bool = False
    """Whether it calls outside any rollout: its attempt is no real one, and nothing is recorded."""


def identify(
    leases: ActiveLeases, key: Key, headers: Mapping[str, str], role: str | None, direct: bool = False
) -> Caller:
    """Return the caller of a request; `role` is the one in its path. With `direct`, clients need no rollout."""
    if key.kind is KeyKind.CLIENT:
        if not direct:
            message = "this server answers the calls of rollouts only: start one with `leyden serve --model`"
            raise KeyRefused(message, "no_context")
        return Caller(_direct_attempt(key), direct=True)
    trace = _TRACEPARENT(headers.get("traceparent", "").strip())
    named = key.attempt or _baggage(headers.get("baggage", ""))
    attempt = leases.get(named) if named else leases.by_trace(trace[1]) if trace else None
    if attempt is None:
        message = "no known rollout: send the key of its attempt, or the trace context or baggage that it was given"
        raise KeyRefused(message, "no_context")
    key.check_run(attempt.run)
    check_attempt(key, leases, attempt.id)
    role = role or headers.get("x-leyden-role")
    if role is not None and not _ROLE(role):
        raise invalid("a role is a name of up to 160 letters, digits, spaces and ._:@~/+-", "x-leyden-role")
    retry = headers.get("x-stainless-retry-count", "0") != "0"
    return Caller(attempt, role, trace[2] if trace else None, retry)


def _direct_attempt(key: Key) -> Attempt:
    """Return an attempt for one call outside rollouts. The scheduler treats the calls of one key as one rollout."""
    id = f"direct-{secrets.token_hex(8)}"
    return Attempt(id, "", key.id, 1, worker="", pool=None, started=time.time(), expires=math.inf)


def _baggage(header: str) -> str | None:
    for member in header.split(","):
        name, _, value = member.partition("=")
        if name.strip() == "leyden.attempt":
            return unquote(value.partition(";")[0].strip())
    return None
