"""`leyden.reward` and `leyden.span`, which an agent may call while it runs.

Outside a worker both do nothing, so that an agent's file stays runnable alone. Inside one they apply to the current
attempt. Rewards are sent to the worker, because the agent's key may not set them.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from opentelemetry import trace

from leyden.client.attempt.result import parse_reward
from leyden.client.tracing.context import current_attempt, current_span, latest_call
from leyden.records import Reward

_RESPONSE_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""What the dialects of the gateway write before the id of a call."""
_send_reward: Callable[[str, Reward], None] | None = None


def connect(send_reward: Callable[[str, Reward], None]) -> None:
    """Set where rewards are sent. A host calls this before its agent runs."""
    global _send_reward
    _send_reward = send_reward


def reward(value: Any, *, name: str = "reward", weight: float = 1.0, call: Any = None, span: Any = None) -> None:
    """Give a step reward to the latest model call, to another `call` (a response or its id), or to a `span`.

    A second reward of the same name on the same call or span replaces the first. A reward given before the first call
    goes to the last call of the attempt. The final reward comes from the agent's return value or the reward function.
    """
    if _send_reward is None:
        return
    attempt = current_attempt()
    if attempt is None:
        raise RuntimeError("leyden.reward: this code does not run within a rollout: call it from the agent")
    fields = {
        "id": f"step-{secrets.token_hex(8)}",
        "value": parse_reward(value, "leyden.reward"),
        "kind": "step",
        "name": name,
        "weight": parse_reward(weight, "leyden.reward's weight"),
        "call": _call_id(call) if call is not None else latest_call() if span is None else None,
        "span": _span_id(span) if span is not None else None,
        "at": time.time(),
    }
    try:
        _send_reward(attempt, msgspec.convert(fields, Reward))
    except msgspec.ValidationError as error:
        raise ValueError(f"leyden.reward: {error}") from None


@contextmanager
def span(name: str, *, role: str | None = None, **attributes: Any) -> Iterator[trace.Span]:
    """Open a span around a part of the agent. Model calls in it get its `role`, which training can select."""
    if _send_reward is None:
        yield trace.INVALID_SPAN
        return
    if role is not None:
        attributes["leyden.role"] = role
    parent = trace.set_span_in_context(current_span())
    tracer = trace.get_tracer("leyden")
    with tracer.start_as_current_span(name, context=parent, attributes=attributes) as opened:
        yield opened


def _call_id(call: Any) -> str:
    """Return the id of a call from a client's response object or from a response id."""
    id = str(getattr(call, "id", call))
    return next((id.removeprefix(prefix) for prefix in _RESPONSE_PREFIXES if id.startswith(prefix)), id)


def _span_id(span: Any) -> str:
    return f"{span.get_span_context().span_id:016x}" if isinstance(span, trace.Span) else str(span)
