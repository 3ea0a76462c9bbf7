"""Builds the prompt of a request that continues a text, and reads its completion.

A text that begins with the prompt and completion of an earlier call keeps their tokens; only the rest is tokenised.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from leyden.records import PromptOrigin
from leyden.rendering.renderer import ParsedResponse
from leyden.server.gateway.dialects.types import Message
from leyden.server.gateway.errors import ErrorKind, GatewayError, invalid
from leyden.server.gateway.prompts.history import History
from leyden.server.gateway.prompts.prefix_index import IndexedCall, PrefixIndex, PrefixMatch
from leyden.server.gateway.prompts.prompt import CUT_BY_STOP, Prompt, longest_text
from leyden.server.gateway.prompts.prompt_tokens import text_after
from leyden.server.gateway.prompts.text_index import TextMatch, joined, segment
from leyden.server.gateway.prompts.tokenising import in_thread, within_memory
from leyden.server.gateway.served_model import ServedModel


class TextParser:
    """Reads completions as plain text: nothing is reasoning or a tool call, and white space stays."""

    def __init__(self, model: ServedModel) -> None:
        self._tokenizer = model.tokenizer
        self._stop_ids = frozenset(model.renderer.get_stop_token_ids())

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Return the text of a completion, without the token that ended it."""
        ids = token_ids[:-1] if token_ids and token_ids[-1] in self._stop_ids else token_ids
        return ParsedResponse(content=text_after(self._tokenizer, prompt_ids or (), ids))


async def build_text_prompt(model: ServedModel, index: PrefixIndex, prompt: str | tuple[int, ...]) -> Prompt:
    """Build the prompt of a text, or of tokens, which stay as they are.

    A text that has too many tokens for the model is refused before it is tokenised.
    """
    if isinstance(prompt, str) and len(prompt) > longest_text(model):
        message = f"the prompt has {len(prompt)} characters, and the model takes {model.engine.context_length} tokens"
        raise GatewayError(ErrorKind.TOO_LONG, message, "prompt")
    if not isinstance(prompt, str) and max(prompt, default=0) >= model.engine.vocab_size:
        message = f"the prompt has a token that the model does not have: ids are below {model.engine.vocab_size}"
        raise invalid(message, "prompt")
    found = index.texts.match(prompt)
    call = index.indexed(found.call) if found is not None else None
    build = partial(_build, model, found, call, prompt)
    return await within_memory(model, index, len(prompt), partial(in_thread, len(prompt), build))


def _build(
    model: ServedModel, found: TextMatch | None, call: IndexedCall | None, prompt: str | tuple[int, ...]
) -> Prompt:
    """Build a prompt. It reads only immutable state, so it may run in any thread."""
    if found is None or call is None:
        text = prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)
        ids = model.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise invalid("the prompt is empty", "prompt")
        history = History.of((segment(text),), (), model.name)
        return Prompt(history, PrefixMatch(PromptOrigin.FRESH, "", None, 0), PromptOrigin.FRESH, "", ids)
    earlier = call.full_prompt()
    if isinstance(prompt, str):
        given = prompt[len(joined(found.segments[:-1])) :]
        length, new = _kept_completion(model, earlier, call.completion_ids, given)
        ids = [*earlier, *call.completion_ids[:length], *model.tokenizer.encode(new)]
        exact = len(given) - len(new) >= len(found.segments[-1]["content"])
    else:
        whole = len(earlier) + len(call.completion_ids)
        length = (whole if prompt[:whole] == (*earlier, *call.completion_ids) else whole - 1) - len(earlier)
        ids, exact = list(prompt), True
        new = text_after(model.tokenizer, prompt[: len(earlier) + length], prompt[len(earlier) + length :])
    segments = _segments(found, given if isinstance(prompt, str) else None, new)
    origin, reason = (PromptOrigin.CONTINUED, "") if exact else (PromptOrigin.RERENDERED, CUT_BY_STOP)
    history = History.of(segments, (), model.name)
    match = PrefixMatch(origin, reason, call, len(found.segments))
    return Prompt(history, match, origin, reason, ids, len(earlier) + length)


def _segments(found: TextMatch, given: str | None, new: str) -> tuple[Message, ...]:
    """Return the segments of a text that continues a call."""
    rest = new if given is None else given[len(found.segments[-1]["content"]) :]
    return (*found.segments, segment(rest)) if rest else found.segments


def _kept_completion(
    model: ServedModel, prompt: Sequence[int], completion: Sequence[int], given: str
) -> tuple[int, str]:
    """Return how many tokens of a completion a text keeps, and the rest of the text.

    The token that ended the completion is not part of its text, unless the text says so.
    """
    for length in range(len(completion), 0, -1):
        text = text_after(model.tokenizer, prompt, completion[:length])
        if given.startswith(text):
            return length, given[len(text) :]
    return 0, given
