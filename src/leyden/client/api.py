"""What an agent may say from the inside: `leyden.reward` and `leyden.span`.

Without a server both do nothing, so that an agent's file stays runnable alone. With one, what they say is for the
attempt that is running: rewards go to the worker, who alone may set them.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from opentelemetry import trace

from leyden.client.attempt.result import read_reward
from leyden.client.tracing import latest_call
from leyden.client.tracing.context import current_attempt, current_span
from leyden.records import Reward

_record: Callable[[str, Reward], None] | None = None


def connect(record: Callable[[str, Reward], None]) -> None:
    """Say where rewards go; called by a host before its agent runs."""
    global _record
    _record = record


def reward(value: Any, *, name: str = "reward", weight: float = 1.0, call: Any = None, span: Any = None) -> None:
    """Give a step reward: to the latest model call here, or to another `call` (a response or its id), or to a `span`.

    Another of the same name on the same call or span takes its place. Before the first call it goes to the last one
    of the attempt. The final reward is what the agent returns, or the run's reward function says.
    """
    if _record is None:
        return
    attempt = current_attempt()
    if attempt is None:
        raise RuntimeError("leyden.reward: for which rollout? This code runs outside of any: call it within the agent")
    given = {
        "id": f"step-{secrets.token_hex(8)}",
        "value": read_reward(value, "leyden.reward"),
        "kind": "step",
        "name": name,
        "weight": read_reward(weight, "leyden.reward's weight"),
        "call": _call_id(call) if call is not None else latest_call.latest() if span is None else None,
        "span": _span_id(span) if span is not None else None,
        "at": time.time(),
    }
    try:
        _record(attempt, msgspec.convert(given, Reward))
    except msgspec.ValidationError as error:
        raise ValueError(f"leyden.reward: {error}") from None


@contextmanager
def span(name: str, *, role: str | None = None, **attributes: Any) -> Iterator[trace.Span]:
    """A span around a part of the agent; model calls in it have its `role`, by which training can select them."""
    if _record is None:
        yield trace.INVALID_SPAN
        return
    if role is not None:
        attributes["leyden.role"] = role
    around = trace.set_span_in_context(current_span())
    tracer = trace.get_tracer("leyden")
    with tracer.start_as_current_span(name, context=around, attributes=attributes) as made:
        yield made


def _call_id(call: Any) -> str:
    """Of a response as clients give it, or the id that is in it."""
    return str(getattr(call, "id", call)).removeprefix("chatcmpl-").removeprefix("msg_")  # which dialects put before it


def _span_id(span: Any) -> str:
    return f"{span.get_span_context().span_id:016x}" if isinstance(span, trace.Span) else str(span)
