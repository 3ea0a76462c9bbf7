"""Builds the prompt of a call. Tokens that were sampled before stay as they are wherever that can be proven correct."""

from functools import partial
from itertools import takewhile
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from leyden.records import PromptOrigin
from leyden.rendering.renderer import AttributingRenderer, ChatRenderer, ToolCallForcer
from leyden.server.gateway.dialects.types import GenerationRequest
from leyden.server.gateway.errors import ErrorKind, GatewayError, invalid
from leyden.server.gateway.prompts.history import History
from leyden.server.gateway.prompts.prefix_index import PrefixIndex, PrefixMatch
from leyden.server.gateway.prompts.tokenising import in_thread, within_memory
from leyden.server.gateway.served_model import ServedModel

NOT_EXTENDED = "the model's template does not extend this turn"
DROPS_REASONING = "the model's template drops the reasoning of earlier turns"
_PREFILL_AND_FORMAT = "an answer in a format cannot be continued: leave out the assistant's last message, or the format"
CUT_BY_STOP = "a stop string cut the answer: its tokens say more than its text"
_MAX_DROPPED = 8
"""Reasoning of earlier turns, in lengths of the longest text that the model takes."""


class Prompt(Struct, frozen=True):
    """The prompt of a call: its tokens, the earlier call that it shares most with, and how it was built.

    Calls to an upstream have no token ids.
    """

    history: History
    match: PrefixMatch
    origin: PromptOrigin
    reason: str
    """Why it was rendered again, if it was, or what its client dropped."""
    ids: list[int] = []
    kept: int = 0
    """How many of the ids are those of the matching call's prompt and completion."""
    forced: tuple[int, ...] = ()
    """The last of the ids, if they begin a tool call that the model has to make."""


async def build_prompt(
    model: ServedModel,
    index: PrefixIndex,
    request: GenerationRequest,
    history_mode: Literal["template", "exact"] = "template",
    begin_call: bool = True,
) -> Prompt:
    """Build the prompt of a request, with the beginning of the answer if the request gives or requires one.

    `begin_call` is False if a grammar will constrain the answer to a required tool call.

    The request is matched at once against the calls that have ended. Rendering depends only on that match and may run
    in a thread, so calls of one attempt can be built at the same time.
    """
    renderer = model.renderer
    forces_call = begin_call and request.tool_choice.mode == "required"
    if forces_call and not isinstance(renderer, ToolCallForcer):
        raise invalid("this model cannot be forced to call a tool: use auto", "tool_choice")
    _refuse_far_too_long(model, request)
    history = History.of(request.messages, request.tools, model.name)
    _refuse_too_long(model, request, history)
    prefill = request.prefill
    asked = request if prefill is None else replace(request, messages=request.messages[:-1])
    to_match = history if prefill is None else History.of(asked.messages, asked.tools, model.name)
    if prefill is not None and (not asked.messages or request.format is not None):
        why = "a beginning of the answer needs a message before it" if not asked.messages else _PREFILL_AND_FORMAT
        raise invalid(why, "messages")
    builder = _PromptBuilder(model, asked, to_match, index.match(to_match), history_mode == "exact")

    async def build() -> Prompt:
        prompt = await _build(builder)
        if prefill is None:
            return prompt
        begun = await in_thread(len(prefill), partial(model.tokenizer.text_ids, prefill))
        return replace(prompt, history=history, ids=[*prompt.ids, *begun])

    prompt = await within_memory(model, index, history.whole_sizes[-1], build)
    if not forces_call or not isinstance(renderer, ToolCallForcer):
        return prompt
    forced = tuple(renderer.begin_call(request.tool_choice.name))
    return replace(prompt, ids=[*prompt.ids, *forced], forced=forced)


async def count_tokens(
    model: ServedModel,
    index: PrefixIndex,
    request: GenerationRequest,
    history_mode: Literal["template", "exact"] = "template",
) -> int:
    """Return the number of tokens in the prompt of a request, or of a conversation that ends with a whole answer."""
    if request.messages[-1]["role"] != "assistant":
        return len((await build_prompt(model, index, request, history_mode)).ids)
    history = History.of(request.messages, request.tools, model.name)
    if (answered := index.answered_tokens(history)) is not None:
        return answered
    _refuse_too_long(model, request, history)
    messages, tools = list(request.messages), list(request.tools) or None
    size, render = history.whole_sizes[-1], partial(model.renderer.render_ids, messages, tools=tools)
    return len(await within_memory(model, index, size, partial(in_thread, size, render)))


def _refuse_far_too_long(model: ServedModel, request: GenerationRequest) -> None:
    """Refuse more reasoning and longer arguments than an agent can have collected, before either is read."""
    longest = longest_text(model)
    answers = [message for message in request.messages if message["role"] == "assistant"]
    reasoning = sum(len(answer.get("reasoning_content") or "") for answer in answers)
    if reasoning > _MAX_DROPPED * longest:
        message = f"the request has {reasoning} bytes of reasoning: leave out that of earlier answers"
        raise GatewayError(ErrorKind.TOO_LONG, message, "messages")
    calls = [call for answer in answers for call in answer.get("tool_calls") or ()]
    size = sum(len(call["id"]) + len(call["function"]["arguments"]) for call in calls)
    if size > _MAX_DROPPED * longest:
        message = f"the tool calls have {size} bytes, and the model takes {model.engine.context_length} tokens in all"
        raise GatewayError(ErrorKind.TOO_LONG, message, "messages")


def _refuse_too_long(model: ServedModel, request: GenerationRequest, history: History) -> None:
    """Refuse a request whose text has too many tokens for the model, before it is tokenised.

    Tokenising takes a hundred times the memory of the text. Reasoning does not count, since templates may drop it.
    """
    longest = longest_text(model)
    if history.sizes[-1] <= longest:
        return
    text = sum(len(message["content"].rpartition("</think>")[2].strip()) for message in request.messages)
    size = max(text, history.sizes[-1])
    if text > longest or size > 2 * longest:
        message = f"the request has {size} bytes, and the model takes {model.engine.context_length} tokens in all"
        raise GatewayError(ErrorKind.TOO_LONG, message, "messages")


def longest_text(model: ServedModel) -> int:
    """Return how long a text may be to have no more tokens than the model takes, if each is the longest one."""
    return model.engine.context_length * model.tokenizer.longest_token


async def _build(builder: "_PromptBuilder") -> Prompt:
    sizes, match = builder.history.whole_sizes, builder.match
    if match.origin is PromptOrigin.CONTINUED:
        extended = await in_thread(sizes[-1] - sizes[match.shared_messages], builder.extend)
        if extended is not None:
            return extended
    return await in_thread(sizes[-1], builder.render)


class _PromptBuilder(Struct, frozen=True):
    """Builds one prompt. It reads only immutable state, so it may run in any thread."""

    model: ServedModel
    request: GenerationRequest
    history: History
    match: PrefixMatch
    exact: bool

    @property
    def tools(self) -> list[Any] | None:
        return list(self.request.tools) or None

    def extend(self) -> Prompt | None:
        """Append the new messages to the tokens of the matching call; None if the template writes it otherwise."""
        if self.exact:
            return self._extend_with(self.model.exact_renderer)
        return None if self._was_cut else self._extend_with(self.model.renderer)

    def render(self) -> Prompt:
        """Render the whole conversation; keep the earlier tokens if they decode to the same text."""
        if self.match.origin is PromptOrigin.RERENDERED and self.match.answered:
            spliced = self._render_after_answer()
            if spliced is not None:
                return spliced
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
        """Whether the completion to extend contains a stop string, and maybe more, that its agent did not see."""
        call = self.match.call
        assert call is not None
        ids = list(call.completion_ids)
        if call.finish == "length" or ids[-1] in self.model.renderer.get_stop_token_ids():
            return False
        if call.finish == "stop":
            return True
        whole, before = (self.model.tokenizer.decode(some) for some in (ids, ids[:-1]))
        settled = len(before.rstrip("\ufffd"))  # an answer may also end with its tool call
        return any(whole.rfind(stop) + len(stop) > settled for stop in call.stop if stop in whole)

    def _extend_with(self, renderer: ChatRenderer) -> Prompt | None:
        call = self.match.call
        assert call is not None
        prompt_ids, completion = call.full_prompt(), list(call.completion_ids)
        kept = len(prompt_ids) + len(completion)
        new = list(self.request.messages[self.match.shared_messages :])
        bridged = renderer.bridge_to_next_turn(prompt_ids, completion, new, tools=self.tools)
        if bridged is None or bridged.token_ids[:kept] != prompt_ids + completion:
            return None
        return Prompt(self.history, self.match, PromptOrigin.CONTINUED, self.match.reason, bridged.token_ids, kept)

    def _render_after_answer(self) -> Prompt | None:
        """Keep all tokens of the matching call, render only the messages after its answer; None if this is unsafe.

        The matching call has to be one that the renderer extends by the other messages. The template's tokens follow
        the stop token of its answer, where no tokenizer merges anything.
        """
        call, renderer = self.match.call, self.model.renderer
        assert call is not None
        extending = self.model.exact_renderer if self.exact else renderer
        messages, shared = list(self.request.messages), self.match.shared_messages
        others = [message for message in messages[shared:] if message["role"] != "assistant"]
        if self._was_cut or not others or not isinstance(renderer, AttributingRenderer):
            return None
        prompt_ids, completion = call.full_prompt(), list(call.completion_ids)
        if extending.bridge_to_next_turn(prompt_ids, completion, others, tools=self.tools) is None:
            return None
        rendered = renderer.render(messages, tools=self.tools, add_generation_prompt=True)
        pairs = zip(rendered.token_ids, rendered.message_indices, strict=True)
        stop = (completion[-1], shared - 1)
        ends = [at for at, pair in enumerate(pairs, 1) if pair == stop]
        if stop[0] not in renderer.get_stop_token_ids() or not ends:
            return None
        ids = prompt_ids + completion + rendered.token_ids[ends[-1] :]
        kept = len(prompt_ids) + len(completion)
        return Prompt(self.history, self.match, PromptOrigin.RERENDERED, self.match.reason, ids, kept)
