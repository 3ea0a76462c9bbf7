"""Joins the conversation of a stored response with the new input of a request.

A client may send messages again that the stored conversation already has; each is kept once.
"""

from collections.abc import Sequence

from leyden.server.gateway.dialects.types import Message
from leyden.server.gateway.prompts.history import meanings


def without_repeated(stored: Sequence[Message], given: Sequence[Message]) -> Sequence[Message]:
    """Return the messages of a request that are new. `stored` is the conversation so far; its last one is the answer.

    Sent again can be: the end of the conversation or all of it, with or without the answer, and, if the answer calls
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
    repeated = set(known)
    return [message for at, message in enumerate(given) if at >= results or sent[at] not in repeated]


def _overlap(known: Sequence[bytes], sent: Sequence[bytes]) -> int:
    """Return how many messages at the end of the first are the beginning of the second (Knuth-Morris-Pratt)."""
    borders: list[int] = []
    """For each beginning of `sent`, how many messages at its end are the beginning of it too."""

    def extended(length: int, message: bytes) -> int:
        """Return how many messages of `sent` end with this message, if so many end before it."""
        while length and (length == len(sent) or sent[length] != message):
            length = borders[length - 1]
        return length + (sent[length] == message)

    for message in sent:
        borders.append(extended(borders[-1], message) if borders else 0)
    length = 0
    for message in known if sent else ():
        length = extended(length, message)
    return length
