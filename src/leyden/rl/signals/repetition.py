"""The same tool call again, though nothing has changed that the model could know of.

A call is repeated where its conversation, since anybody else last spoke in it, already has one of the same tool with
the same arguments; where no call was tried since that had not been tried before (reading what was just written is no
repetition; going round in circles is); and where the second result is not another than the first. Calls of one answer
are made at once. Other conversations of the rollout do not matter: this one's model has not seen them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from leyden.episodes import Episode
from leyden.records import Call
from leyden.rl.signals.tool_calls import ObservedToolCall, ToolResult, tool_calls_of

Key = tuple[str, bytes]


def repeated(episode: Episode, asked: Sequence[ObservedToolCall], results: Mapping[int, ToolResult]) -> set[int]:
    """Those of an episode's tool calls, by index, that repeat earlier ones."""
    keys = [made.key for made in asked]
    common = {key for key, times in Counter(keys).items() if times > 1}
    found = set[int]()
    for _, group in groupby(range(len(asked)), lambda index: asked[index].call.id):
        indices = [index for index in group if keys[index] in common]
        before = _tried(episode, asked[indices[0]].call) if indices else []
        here: dict[Key, str | None] = {}
        for index in indices:
            key, text = keys[index], results[index].text if index in results else None
            again, earlier = (True, here[key]) if key in here else _again(key, before)
            if again and (text is None or earlier is None or text == earlier):
                found.add(index)
            here[key] = text
    return found


def _tried(episode: Episode, call: Call) -> list[dict[Key, str | None]]:
    """The answers with tool calls that a call's prompt shows, since anybody else last spoke, with their results."""
    tried: list[dict[Key, str | None]] = []
    keys: dict[str, Key] = {}
    for message in episode.messages(call):
        match message:
            case {"role": "assistant"}:
                asked = tool_calls_of(call, message)
                keys = {made.id: made.key for made in asked}
                if asked:
                    tried.append(dict.fromkeys(keys.values()))
            case {"role": "tool", "tool_call_id": str(id), "content": str(text)}:
                if id in keys:
                    tried[-1][keys[id]] = text
            case _:
                tried, keys = [], {}
    return tried


def _again(key: Key, tried: Sequence[dict[Key, str | None]]) -> tuple[bool, str | None]:
    """Whether a call was tried before with nothing new since, and the result it had then."""
    last = next((at for at in reversed(range(len(tried))) if key in tried[at]), None)
    if last is None:
        return False, None
    known = {made for answer in tried[: last + 1] for made in answer}
    return all(made in known for answer in tried[last + 1 :] for made in answer), tried[last][key]
