"""The prompt of a call: what was sampled before stays as it was, token for token, wherever that can be proven."""

from itertools import takewhile
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from leyden.records import Made
from leyden.server.gateway.ask import Ask
from leyden.server.gateway.conversation import Conversation, History, Place
from leyden.server.gateway.errors import GatewayError, Trouble
from leyden.server.gateway.policy import Policy


class Prompt(Struct, frozen=True):
    """A prompt, where it stands, and how it was made."""

    history: History
    place: Place
    made: Made
    why: str
    ids: list[int]
    kept: int
    forced: tuple[int, ...] = ()
    """The last of the ids: the beginning of an answer that must be a tool call."""


def make_prompt(policy: Policy, conversation: Conversation, ask: Ask) -> Prompt:
    """The prompt of a call, with the beginning of the answer where that is not left to the model."""
    prompt = _unforced_prompt(policy, conversation, ask)
    if ask.tool_choice.mode != "required":
        return prompt
    force = getattr(policy.renderer, "begin_call", None)
    if force is None:
        raise GatewayError(Trouble.INVALID, "this model cannot be made to call a tool: leave it at auto", "tool_choice")
    forced = tuple(force(ask.tool_choice.name))
    return replace(prompt, ids=[*prompt.ids, *forced], forced=forced)


def _unforced_prompt(policy: Policy, conversation: Conversation, ask: Ask) -> Prompt:
    """What was sampled before stays as it was, token for token, wherever that can be proven."""
    tools = list(offered(ask)) or None
    history = History.of(ask.messages, offered(ask), policy.name)
    place = conversation.place(history)
    made, why = place.made, place.why
    if made is Made.CONTINUED and place.turn is not None:
        before, completion = place.turn.whole_prompt(), list(place.turn.completion_ids)
        bridged = policy.renderer.bridge_to_next_turn(
            before, completion, list(ask.messages[place.shared :]), tools=tools
        )
        if bridged is not None and bridged.token_ids[: len(before) + len(completion)] == before + completion:
            return Prompt(history, place, made, why, bridged.token_ids, len(before) + len(completion))
        made, why = Made.RERENDERED, "the model's template does not extend this turn"
    ids = list(policy.renderer.render_ids(list(ask.messages), tools=tools, add_generation_prompt=True))
    kept = 0
    if place.turn is not None:
        earlier = [*place.turn.whole_prompt(), *place.turn.completion_ids]
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(earlier, ids, strict=False)))
    return Prompt(history, place, made, why, ids, kept)


def offered(ask: Ask) -> tuple[Any, ...]:
    """The tools that the model is told of."""
    return () if ask.tool_choice.mode == "none" else ask.tools
