"""A state is the messages since the model's last answer: rollouts with different histories can reach the same state."""

from collections.abc import Hashable

import msgspec

from leyden.episodes import Episode
from leyden.records import Call
from leyden.rl.registry import state


@state()
def messages(episode: Episode, call: Call) -> Hashable:
    """Return the role and the messages after the last answer, without the ids of tool calls, which always differ."""
    new = []
    for message in reversed(episode.messages(call)):
        if message["role"] == "assistant":
            break
        new.append({name: value for name, value in message.items() if name != "tool_call_id"})
    return episode.role(call), msgspec.json.encode(new, order="deterministic")
