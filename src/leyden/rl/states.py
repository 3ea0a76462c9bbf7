"""When two calls of a group are in the same state: when their keys are equal.

By default a state is what has come in since the model last spoke, and in which role it is asked; so two rollouts meet
again in the same place however they got there. `prompt` wants the whole history to be the same, to the token.
"""

from collections.abc import Callable, Hashable, Sequence

import msgspec
import numpy as np

from leyden.episodes import Episode
from leyden.records import Call
from leyden.rl.advantage import Ints, total
from leyden.rl.choosing import OWN, UnknownName

StateKey = Callable[[Episode, Call], Hashable]


def messages(episode: Episode, call: Call) -> Hashable:
    """The role, and the messages after the last answer; without the ids of tool calls, which are never the same."""
    new = []
    for message in reversed(episode.messages(call)):
        if message["role"] == "assistant":
            break
        new.append({name: value for name, value in message.items() if name != "tool_call_id"})
    return episode.role(call), msgspec.json.encode(new, order="deterministic")


def prompt(episode: Episode, call: Call) -> Hashable:
    """Every token that the model was given."""
    return episode.prompt_ids(call)


def state_key(name: str) -> StateKey:
    """The key that a name stands for."""
    known: dict[str, StateKey] = {"messages": messages, "prompt": prompt}
    if name not in known:
        raise UnknownName(f"`algorithm.state`: there is no {name!r}; there are {', '.join(known)}, or {OWN}")
    return known[name]


def numbered(groups: Sequence[int], keys: Sequence[Hashable]) -> Ints:
    """A number for the state of each call: the same for equal keys of the same group."""
    numbers: dict[Hashable, int] = {}
    return np.array(
        [numbers.setdefault(place, len(numbers)) for place in zip(groups, keys, strict=True)], dtype=np.int64
    )


def shared(states: Ints) -> float:
    """The share of calls that have another in their state: those of which the step level of `gigpo` says anything."""
    return float((total(np.ones(len(states)), states) > 1.5).mean()) if len(states) else 0.0
