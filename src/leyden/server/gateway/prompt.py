"""Builds the prompt of a call. Tokens that were sampled before stay as they are wherever that can be proven correct."""

import asyncio
from collections.abc import Callable
from itertools import takewhile
from typing import Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from leyden.records import PromptOrigin
from leyden.rendering.renderer import ChatRenderer, ToolCallForcer
from leyden.rendering.tokenizer import LONG_TEXT
from leyden.server.gateway.dialects.types import GenerationRequest
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prefix_index import History, PrefixIndex, PrefixMatch
from leyden.server.gateway.served_model import ServedModel

NOT_EXTENDED = "the model's template does not extend this turn"
DROPS_REASONING = "the model's template drops the reasoning of earlier turns"
CUT_BY_STOP = "a stop string cut the answer: its tokens say more than its text"

_LARGE_TEXT = 256 << 10
"""Prompts of this many bytes are built one at a time for an attempt, and two at a time for a model."""

T = TypeVar("T")


class Prompt(Struct, frozen=True):
    """The prompt of a call: its tokens, the earlier call that it shares most with, and how it was built.

    Calls to an upstream have no token ids.
    """

    history: History
    match: PrefixMatch
    origin: PromptOrigin
    reason: str
    """Why it was rendered again, if it was."""
    ids: list[int] = []
    kept: int = 0
    """How many of the ids are those of the matching call's prompt and completion."""
    forced: tuple[int, ...] = ()
    """The last of the ids, where they begin a tool call that the model has to make."""


async def build_prompt(
    model: ServedModel,
    index: PrefixIndex,
    request: GenerationRequest,
    history_mode: Literal["template", "exact"] = "template",
) -> Prompt:
    """Build the prompt of a request, with the beginning of a tool call where `tool_choice` requires one.

    The request is matched at once against the calls that have ended. Rendering depends only on that match and runs in a
    thread for long texts, so calls of one attempt can be built at the same time.
    """
    renderer = model.renderer
    forces_call = request.tool_choice.mode == "required"
    if forces_call and not isinstance(renderer, ToolCallForcer):
        raise GatewayError(ErrorKind.INVALID, "this model cannot be forced to call a tool: use auto", "tool_choice")
    history = History.of(request.messages, request.offered_tools, model.name)
    _refuse_too_long(model, request, history)
    builder = _PromptBuilder(model, request, history, index.match(history), history_mode == "exact")
    if history.sizes[-1] > _LARGE_TEXT:
        async with index.large_prompts, model.large_prompts:
            prompt = await _build(builder)
    else:
        prompt = await _build(builder)
    if not forces_call or not isinstance(renderer, ToolCallForcer):
        return prompt
    forced = tuple(renderer.begin_call(request.tool_choice.name))
    return replace(prompt, ids=[*prompt.ids, *forced], forced=forced)


def _refuse_too_long(model: ServedModel, request: GenerationRequest, history: History) -> None:
    """Refuse a request whose text has too many tokens for the model, before it is tokenised.

    Tokenising takes a hundred times the memory of the text. Reasoning does not count, since templates may drop it.
    """
    context_length = model.engine.context_length
    longest_text = context_length * model.tokenizer.longest_token
    text = sum(len(message["content"].rpartition("</think>")[2].strip()) for message in request.messages)
    size = max(text, history.sizes[-1])
    if text > longest_text or size > 2 * longest_text:
        message = f"the request has {size} bytes, and the model takes {context_length} tokens in all"
        raise GatewayError(ErrorKind.TOO_LONG, message, "messages")


async def _build(builder: "_PromptBuilder") -> Prompt:
    sizes, match = builder.history.sizes, builder.match
    if match.origin is PromptOrigin.CONTINUED:
        extended = await _in_thread_if_long(sizes[-1] - sizes[match.shared_messages], builder.extend)
        if extended is not None:
            return extended
    return await _in_thread_if_long(sizes[-1], builder.render)


async def _in_thread_if_long(size: int, work: Callable[[], T]) -> T:
    """Run work on a text of this size; in a thread where it would block the event loop for milliseconds."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


class _PromptBuilder(Struct, frozen=True):
    """Builds one prompt. It reads only immutable state, so it may run in any thread."""

    model: ServedModel
    request: GenerationRequest
    history: History
    match: PrefixMatch
    exact: bool

    @property
    def tools(self) -> list[Any] | None:
        return list(self.request.offered_tools) or None

    def extend(self) -> Prompt | None:
        """Append the new messages to the tokens of the matching call; None where the template writes it otherwise."""
        if self.exact:
            return self._extend_with(self.model.exact_renderer)
        return None if self._was_cut else self._extend_with(self.model.renderer)

    def render(self) -> Prompt:
        """Render the whole conversation; keep the earlier tokens where they decode to the same text."""
        messages = list(self.request.messages)
        ids = list(self.model.renderer.render_ids(messages, tools=self.tools, add_generation_prompt=True))
        origin, reason = self.match.origin, self.match.reason
        if origin is PromptOrigin.CONTINUED:
            origin, reason = PromptOrigin.RERENDERED, CUT_BY_STOP if self._was_cut else NOT_EXTENDED
            extended = None if self._was_cut or self.exact else self._extend_with(self.model.exact_renderer)
            if extended is not None:
                decode = self.model.tokenizer.decode
                if decode(extended.ids) == decode(ids):  # the template had nothing to drop
                    return extended
                reason = DROPS_REASONING
        kept = 0
        if self.match.call is not None:
            earlier = [*self.match.call.full_prompt(), *self.match.call.completion_ids]
            kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(earlier, ids, strict=False)))
        return Prompt(self.history, self.match, origin, reason, ids, kept)

    @property
    def _was_cut(self) -> bool:
        """Whether the completion to extend holds a stop string, and maybe more, that its agent did not see."""
        call = self.match.call
        assert call is not None
        return call.finish == "stop" and call.completion_ids[-1] not in self.model.renderer.get_stop_token_ids()

    def _extend_with(self, renderer: ChatRenderer) -> Prompt | None:
        call = self.match.call
        assert call is not None
        prompt_ids, completion = call.full_prompt(), list(call.completion_ids)
        kept = len(prompt_ids) + len(completion)
        new = list(self.request.messages[self.match.shared_messages :])
        bridged = renderer.bridge_to_next_turn(prompt_ids, completion, new, tools=self.tools)
        if bridged is None or bridged.token_ids[:kept] != prompt_ids + completion:
            return None
        return Prompt(self.history, self.match, PromptOrigin.CONTINUED, "", bridged.token_ids, kept)
