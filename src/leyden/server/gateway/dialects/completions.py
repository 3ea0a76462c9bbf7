"""The OpenAI completions dialect: /v1/completions, which continues texts or tokens as they are."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from leyden.records import Token
from leyden.server.gateway.dialects.base import Dialect, DialectRequest, ModelAccess, RouteRequest
from leyden.server.gateway.dialects.encoding import decode_body, given_of
from leyden.server.gateway.dialects.openai import CallParameters, ChunkWriter, openai_error
from leyden.server.gateway.dialects.types import (
    AnswerEvent,
    AnswerFinished,
    AnswerStarted,
    GenerationRequest,
    PromptTokens,
    TextDelta,
    TokenInfo,
)
from leyden.server.gateway.errors import invalid

_DEFAULT_MAX_TOKENS = 16  # as in OpenAI's service
_MAX_PROMPTS = 128


class CompletionRequest(CallParameters, frozen=True, kw_only=True):
    """The fields that the gateway reads; it records the others and ignores them."""

    prompt: str | list[Any]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0 samples nothing: for the logprobs of the prompt, with `echo`."""
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    suffix: str | None = None
    return_token_ids: bool | None = None
    """As in vLLM: the choices have `token_ids`, which a client that sends tokens needs to continue."""

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt is returned with its logprobs."""
        return bool(self.echo) and self.logprobs is not None


async def _read(call: RouteRequest, access: ModelAccess) -> DialectRequest:
    """Read a request; each of its prompts becomes a `GenerationRequest`."""
    request, document = decode_body(call.body, CompletionRequest)
    _check_supported(request)
    limit = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    first, *others = (
        GenerationRequest(
            model=request.model,
            messages=(),
            prompt=prompt,
            sampling=request.sampling(limit),
            n=request.choices,
            stream=bool(request.stream),
            top_logprobs=0 if request.logprobs is None and request.return_token_ids else request.logprobs,
            prompt_logprobs=request.echoes_logprobs,
            ignored=given_of(document, ("logit_bias",)),
            request={name: value for name, value in document.items() if name != "prompt"},
        )
        for prompt in _prompts(request.prompt)
    )
    return DialectRequest(first, lambda started: CompletionsWriter(request, 1 + len(others), started), (*others,))


def _check_supported(request: CompletionRequest) -> None:
    if request.suffix:
        raise invalid("the model writes the end of a text, not its middle", "suffix")
    if request.best_of is not None and request.best_of > request.choices:
        raise invalid("all completions are returned: leave it out, or set n", "best_of")


def _prompts(prompt: str | list[Any]) -> list[str | tuple[int, ...]]:
    """Return the prompts of a request: a text, tokens, or a list of either."""
    many = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not 0 < len(many) <= _MAX_PROMPTS:
        raise invalid(f"send 1 to {_MAX_PROMPTS} prompts", "prompt")
    try:
        return [one if isinstance(one, str) else tuple(msgspec.convert(one, list[Token])) for one in many]
    except msgspec.ValidationError as error:
        raise invalid(f"a prompt is a text or a list of token ids: {error}", "prompt") from error


class CompletionsWriter(ChunkWriter):
    """Writes text completions, whole or as chunks."""

    def __init__(self, request: CompletionRequest, prompts: int, started: AnswerStarted) -> None:
        id = f"cmpl-{started.id}"
        super().__init__(id, "text_completion", request.model, request.choices, request.streams_usage)
        self._request, self._started = request, started
        self._count = prompts * request.choices
        self._offsets = [0] * self._count

    def whole(self, events: Sequence[AnswerEvent]) -> bytes:
        """Write a `text_completion` object."""
        choices: list[dict[str, Any]] = [
            {"index": index, "text": "", "finish_reason": None, "logprobs": None} for index in range(self._count)
        ]
        for event in (self._started, *events):
            for index, text, fields in self._written(event):
                choice = choices[index]
                choice["text"] += text
                for name, values in fields.items():
                    _extend(choice, name, values)
            if isinstance(event, AnswerFinished):
                choices[event.choice]["finish_reason"] = _finish_reason(event)
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._usage()})

    def stream_start(self) -> bytes:
        """Write the first prompt, if it is echoed."""
        return self.stream_event(self._started)

    def stream_event(self, event: AnswerEvent) -> bytes:
        """Write the chunks of an event."""
        if isinstance(event, AnswerFinished):
            self._finished.append(event)
            return self._chunk(event.choice, "", {}, _finish_reason(event))
        return b"".join(self._chunk(index, text, fields) for index, text, fields in self._written(event))

    def _written(self, event: AnswerEvent) -> list[tuple[int, str, dict[str, Any]]]:
        """Return the choices that an event adds to, with their new text and the other fields of their new tokens."""
        match event:
            case AnswerStarted() if self._request.echo and not self._request.echoes_logprobs:
                own = range(event.choice, event.choice + self._request.choices)
                return [(index, event.prompt_text, self._token_fields(index, ())) for index in own]
            case PromptTokens(choice, text, tokens, offsets):
                self._offsets[choice] = len(text)
                return [(choice, text, {"logprobs": _logprobs(tokens, offsets)})]
            case TextDelta(choice, text, tokens):
                return [(choice, text, self._token_fields(choice, tokens))]
            case AnswerFinished():
                self._finished.append(event)
        return []

    def _token_fields(self, choice: int, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """Return the fields of a choice for its new tokens, as far as the request wants them."""
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["token_ids"] = [token.id for token in tokens]
        if self._request.logprobs is None:
            return fields
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(token.text)
        fields["logprobs"] = _logprobs(tokens, offsets)
        return fields

    def _chunk(self, choice: int, text: str, fields: dict[str, Any], finish: str | None = None) -> bytes:
        return self._write_chunk({"index": choice, "text": text, "logprobs": None, "finish_reason": finish, **fields})


def _logprobs(tokens: Sequence[TokenInfo], offsets: Sequence[int]) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [_alternatives(token) for token in tokens],
        "text_offset": list(offsets),
    }


def _alternatives(token: TokenInfo) -> dict[str, float] | None:
    """Return the likeliest tokens and the token itself by their text; of several with one text the likeliest."""
    if token.logprob is None:
        return None
    known: dict[str, float] = {}
    for text, _, logprob in (*token.top, (token.text, token.data, token.logprob)):
        known.setdefault(text, logprob)
    return known


def _extend(choice: dict[str, Any], name: str, values: Any) -> None:
    """Append the token fields of a delta to those of its choice."""
    if isinstance(values, list):
        choice[name] = (choice.get(name) or []) + values
    else:
        known = choice[name] or {}
        choice[name] = {part: known.get(part, []) + new for part, new in values.items()}


def _finish_reason(finished: AnswerFinished) -> str:
    return "length" if finished.finish == "length" else "stop"


COMPLETIONS = Dialect("/completions", _read, openai_error)
