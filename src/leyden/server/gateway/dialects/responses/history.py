"""Joins the conversation of a stored response with the new input of a request.

A client may send messages again that the stored conversation already has; each is kept once.
"""

from collections.abc import Sequence

from leyden.server.gateway.dialects.types import Message
from leyden.server.gateway.history import meanings


def without_repeated(stored: Sequence[Message], given: Sequence[Message]) -> Sequence[Message]:
    """Return the messages of a request that are new. `stored` is the conversation so far; its last one is the answer.

    Sent again can be: the end of the conversation or all of it, with or without the answer, and, where the answer calls
    tools, messages before the tools' results. A message that a user repeats on its own is new.
    """
    known, sent = meanings(stored), meanings(given)
    if length := _overlap(known, sent):
        return given[length:]
    if length := _overlap(known[:-1], sent[:-1]):
        return given[length:]
    if not stored[-1].get("tool_calls"):
        return given
    results = next((at for at, message in enumerate(given) if message["role"] == "tool"), 0)
    return [message for at, message in enumerate(given) if at >= results or sent[at] not in known]


def _overlap(known: Sequence[bytes], sent: Sequence[bytes]) -> int:
    """Return how many messages at the end of the first are the beginning of the second."""
    lengths = range(min(len(known), len(sent)), 0, -1)
    return next((length for length in lengths if known[-length:] == sent[:length]), 0)
