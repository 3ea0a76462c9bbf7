"""Finds tool calls that repeat an earlier one although the model has seen nothing new since.

A call is repeated if, in its conversation and since the last message that is neither the model's nor a tool's, the same
tool was called with the same arguments; no new call was made in between (reading what was just written is no
repetition, alternating between two calls is); and its result does not differ from the earlier one. The calls of one
answer are concurrent. Other conversations of the rollout do not count: this one's model has not seen them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from leyden.episodes import Episode
from leyden.records import Call
from leyden.rl.signals.tool_calls import ObservedToolCall, ToolResult, tool_calls_of

Key = tuple[str, bytes]
_Keys = dict[int, dict[str, Key]]
"""By the identity of a message of the episode, the keys of its tool calls by their ids."""


def repeated(episode: Episode, tool_calls: Sequence[ObservedToolCall], results: Mapping[int, ToolResult]) -> set[int]:
    """Return the indices of the tool calls that repeat earlier ones."""
    keys = [tool_call.key for tool_call in tool_calls]
    common = {key for key, count in Counter(keys).items() if count > 1}
    found = set[int]()
    known: _Keys = {}
    for _, group in groupby(range(len(tool_calls)), lambda index: tool_calls[index].call.id):
        indices = [index for index in group if keys[index] in common]
        history = _history(episode, tool_calls[indices[0]].call, known) if indices else []
        same_answer: dict[Key, str | None] = {}
        for index in indices:
            key, text = keys[index], results[index].text if index in results else None
            again, earlier = (True, same_answer[key]) if key in same_answer else _made_before(key, history)
            if again and (text is None or earlier is None or text == earlier):
                found.add(index)
            same_answer[key] = text
    return found


def _history(episode: Episode, call: Call, known: _Keys) -> list[dict[Key, str | None]]:
    """Return the tool calls in a call's prompt since another party last spoke, by answer, with their results."""
    history: list[dict[Key, str | None]] = []
    keys: dict[str, Key] = {}
    for message in episode.messages(call):
        match message:
            case {"role": "assistant"}:
                if id(message) not in known:  # the prompts of a conversation have the same messages
                    known[id(message)] = {made.id: made.key for made in tool_calls_of(call, message)}
                keys = known[id(message)]
                if keys:
                    history.append(dict.fromkeys(keys.values()))
            case {"role": "tool", "tool_call_id": str(answered), "content": str(text)}:
                if answered in keys:
                    history[-1][keys[answered]] = text
            case _:
                history, keys = [], {}
    return history


def _made_before(key: Key, history: Sequence[dict[Key, str | None]]) -> tuple[bool, str | None]:
    """Return whether a call was made before, with no new call since, and the result that it had then."""
    last = next((index for index in reversed(range(len(history))) if key in history[index]), None)
    if last is None:
        return False, None
    known = {key for answer in history[: last + 1] for key in answer}
    return all(key in known for answer in history[last + 1 :] for key in answer), history[last][key]
