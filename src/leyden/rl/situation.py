"""The situation of a call: its role, which conversation of that role it is in, and its turn in the conversation.

It is known before the call is answered. So a baseline may depend on it, and the gradient stays unbiased.
"""

from collections import Counter

from msgspec import Struct

from leyden.episodes import Episode

MAX_TURN = 15
"""Turns from this one on are reported together."""


class Situation(Struct, frozen=True):
    """Where in its rollout a call was made."""

    role: str | None
    conversation: int
    """How many conversations of this role and policy began before."""
    turn: int
    """How many calls of its conversation came before. Further choices of a request have the turn of the first."""

    def __str__(self) -> str:
        names = (self.role or "", f"conversation {self.conversation}" if self.conversation else "", f"turn {self.turn}")
        return ", ".join(name for name in names if name)


def situations(episode: Episode) -> list[Situation]:
    """Return the situation of each call of an episode. An edited history begins a new conversation."""
    found: dict[str, Situation] = {}
    messages: dict[str, int] = {}
    begun: Counter[tuple[str, str | None]] = Counter()
    for call in episode.calls:
        role, before = episode.role(call), found.get(call.parent or "")
        messages[call.id] = call.kept_messages + len(call.messages)
        if before is not None and call.kept_messages > messages[call.parent or ""]:
            found[call.id] = Situation(role, before.conversation, before.turn + 1)
        elif before is not None and not call.prompt_ids:  # the same prompt again
            found[call.id] = Situation(role, before.conversation, before.turn)
        else:
            found[call.id] = Situation(role, begun[call.policy, role], 0)
            begun[call.policy, role] += 1
    return list(found.values())
