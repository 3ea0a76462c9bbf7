"""The prompt of a call: what was sampled before stays as it was, token for token, wherever that can be proven."""

import asyncio
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from leyden.records import PromptOrigin
from leyden.rendering.tokenizer import LONG_TEXT
from leyden.server.gateway.dialects.types import GenerationRequest
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prefix_index import History, PrefixIndex, PrefixMatch
from leyden.server.gateway.served_model import ServedModel

NOT_EXTENDED = "the model's template does not extend this turn"
DROPS_REASONING = "the model's template drops the reasoning of earlier turns"
CUT_BY_STOP = "a stop string cut the answer: its tokens say more than its text"

T = TypeVar("T")


class Prompt(Struct, frozen=True):
    """A prompt, where it stands, and how it was made."""

    history: History
    place: PrefixMatch
    made: PromptOrigin
    why: str
    ids: list[int]
    kept: int
    forced: tuple[int, ...] = ()
    """The last of the ids: the beginning of an answer that must be a tool call."""


async def make_prompt(
    policy: ServedModel,
    conversation: PrefixIndex,
    ask: GenerationRequest,
    keep: Literal["template", "exact"] = "template",
) -> Prompt:
    """The prompt of a call, with the beginning of the answer where that is not left to the model.

    It is placed at once, among the calls that are over; what is rendered then, in a thread where it is long, follows
    from that place alone, so that calls of an attempt may be made at the same time.
    """
    force = getattr(policy.renderer, "begin_call", None)
    if ask.tool_choice.mode == "required" and force is None:
        raise GatewayError(
            ErrorKind.INVALID, "this model cannot be made to call a tool: leave it at auto", "tool_choice"
        )
    history = History.of(ask.messages, offered(ask), policy.name)
    place = conversation.place(history)
    prompt = await _made(_Rendering(policy, ask, history, place, keep == "exact"))
    if force is None or ask.tool_choice.mode != "required":
        return prompt
    forced = tuple(force(ask.tool_choice.name))
    return replace(prompt, ids=[*prompt.ids, *forced], forced=forced)


async def _made(rendering: "_Rendering") -> Prompt:
    sizes, place = rendering.history.sizes, rendering.place
    if place.made is PromptOrigin.CONTINUED:
        extended = await _aside(sizes[-1] - sizes[place.shared], rendering.extended)
        if extended is not None:
            return extended
    return await _aside(sizes[-1], rendering.anew)


async def _aside(size: int, work: Callable[[], T]) -> T:
    """Do work on so much text, in a thread where it would keep everybody waiting."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


class _Rendering(Struct, frozen=True):
    """The making of one prompt. It touches nothing that changes: any thread will do."""

    policy: ServedModel
    ask: GenerationRequest
    history: History
    place: PrefixMatch
    exact: bool

    @property
    def tools(self) -> list[Any] | None:
        return list(offered(self.ask)) or None

    def extended(self) -> Prompt | None:
        """All the tokens of before, then only what is new; None where the template would have it otherwise."""
        if self.exact:
            return self._extended_by(self.policy.exact_renderer)
        return None if self._was_cut else self._extended_by(self.policy.renderer)

    def anew(self) -> Prompt:
        """The whole conversation as the template writes it, unless the tokens of before say the same."""
        messages = list(self.ask.messages)
        ids = list(self.policy.renderer.render_ids(messages, tools=self.tools, add_generation_prompt=True))
        made, why = self.place.made, self.place.why
        if made is PromptOrigin.CONTINUED:
            made, why = PromptOrigin.RERENDERED, CUT_BY_STOP if self._was_cut else NOT_EXTENDED
            extended = None if self._was_cut or self.exact else self._extended_by(self.policy.exact_renderer)
            if extended is not None:
                decode = self.policy.tokenizer.decode
                if decode(extended.ids) == decode(ids):  # there was nothing to drop
                    return extended
                why = DROPS_REASONING
        kept = 0
        if self.place.turn is not None:
            earlier = [*self.place.turn.whole_prompt(), *self.place.turn.completion_ids]
            kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(earlier, ids, strict=False)))
        return Prompt(self.history, self.place, made, why, ids, kept)

    @property
    def _was_cut(self) -> bool:
        """Whether the turn to extend holds a stop string, and maybe more, that its agent was not shown."""
        turn = self.place.turn
        assert turn is not None
        return turn.finish == "stop" and turn.completion_ids[-1] not in self.policy.renderer.get_stop_token_ids()

    def _extended_by(self, renderer: Any) -> Prompt | None:
        turn, shared = self.place.turn, self.place.shared
        assert turn is not None
        before, completion = turn.whole_prompt(), list(turn.completion_ids)
        kept = len(before) + len(completion)
        new = list(self.ask.messages[shared:])
        bridged = renderer.bridge_to_next_turn(before, completion, new, tools=self.tools)
        if bridged is None or bridged.token_ids[:kept] != before + completion:
            return None
        return Prompt(self.history, self.place, PromptOrigin.CONTINUED, "", bridged.token_ids, kept)


def offered(ask: GenerationRequest) -> tuple[Any, ...]:
    """The tools that the model is told of."""
    return () if ask.tool_choice.mode == "none" else ask.tools
