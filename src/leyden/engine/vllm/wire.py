"""The bodies of vLLM's token endpoint, `/inference/v1/generate`: token ids in, token ids and logprobs out, streamed.

It carries no text, so vLLM does not detokenise. Versions differ in two ways: up to 0.25 a top token is named
`"token_id:7"` and an aborted request ends without a finish reason; later versions send `token_id` and `"abort"`.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from leyden.decoding import NotJson, decode_json, decode_text
from leyden.engine.protocol import EngineError, EngineRequest
from leyden.engine.vllm.extension import leyden_grammar

_DONE = b"[DONE]"
_IMPOSSIBLE = -9999.0
"""The logprob that vLLM sends for a probability of 0."""
_WHITESPACE = re.compile(r'"x-guidance": \{"whitespace_pattern": ("(?:[^"\\]|\\.)*")\}')


class TopLogprob(Struct, frozen=True):
    """One of the most likely tokens."""

    logprob: float
    token_id: int | None = None
    token: str | None = None

    @property
    def id(self) -> int:
        """The token's id, whichever way this version names it."""
        return self.token_id if self.token_id is not None else int((self.token or "").removeprefix("token_id:"))


class TokenLogprob(Struct, frozen=True):
    """A sampled token's logprob, and the most likely tokens at its position."""

    logprob: float
    top_logprobs: tuple[TopLogprob, ...] = ()


class Logprobs(Struct, frozen=True):
    """One entry for each token."""

    content: tuple[TokenLogprob, ...] = ()


class Choice(Struct, frozen=True):
    """Tokens since the previous event."""

    token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class PromptLogprob(Struct, frozen=True):
    """The logprob of a token at a position of the prompt."""

    logprob: float


class CompletionEvent(Struct, frozen=True):
    """One server-sent event, or a whole answer."""

    choices: tuple[Choice, ...] = ()
    prompt_logprobs: tuple[dict[str, PromptLogprob] | None, ...] | None = None
    """For each token of the prompt but the first: its logprob, and those of the likeliest tokens, by token id."""
    error: Any = None


_decode = msgspec.json.Decoder(CompletionEvent).decode


def adapter_name(policy: str, version: int) -> str:
    """Return the name of the LoRA adapter of a policy's version."""
    return f"{policy}-{version}"


def body(request: EngineRequest, room: int, seeded: bool, adapter: str | None = None) -> bytes:
    """Build the request for a generation; `room` tokens are left in the context.

    vLLM counts penalties over the tokens of its request only, so for those that were sampled before there is a bias. A
    token on both sides has the presence penalty twice: nothing that vLLM offers ends when a token is sampled.
    """
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": min(request.max_tokens, room),
        "stop_token_ids": request.stop_ids,
        "ignore_eos": True,  # the request's stop ids are all that end it
        # The sampled token takes one of the entries, so that one more is needed for the likeliest ones.
        "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
        "detokenize": False,
    }
    if seeded and sampling.seed is not None:
        parameters["seed"] = sampling.seed
    if request.sampled and (sampling.presence_penalty or sampling.frequency_penalty):
        presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
        counts = Counter(request.sampled_ids)
        parameters["logit_bias"] = {id: -presence - frequency * count for id, count in counts.items()}
    if request.grammar is not None:
        grammar = _bound_whitespace(request.grammar)
        parameters["structured_outputs"] = {"grammar": leyden_grammar.with_sampled(grammar, request.sampled_ids)}
    sent = {"model": adapter, "token_ids": request.prompt_ids, "stream": True, "sampling_params": parameters}
    return msgspec.json.encode(sent)


def prompt_logprobs_body(request: EngineRequest, adapter: str | None = None) -> bytes:
    """Build the request for the logprobs of a prompt. Only an answer that is not streamed has them."""
    parameters = {"max_tokens": 1, "prompt_logprobs": request.top_logprobs, "detokenize": False}
    return msgspec.json.encode(
        {"model": adapter, "token_ids": request.prompt_ids, "stream": False, "sampling_params": parameters}
    )


def prompt_logprobs(
    event: CompletionEvent, ids: tuple[int, ...], count: int
) -> tuple[tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]:
    """Return the logprobs of the prompt's tokens but the first, and the `count` likeliest tokens at each."""
    positions = (event.prompt_logprobs or ())[1:]
    try:
        chosen = [known[str(id)].logprob for id, known in zip(ids[1:], positions, strict=True) if known is not None]
        tops = [_likeliest(known or {}, count) for known in positions] if count else []
    except (KeyError, ValueError) as error:
        raise EngineError(f"vLLM did not send the logprobs of the prompt: {error!r}") from error
    return tuple(chosen), tuple(tops)


def _likeliest(known: dict[str, PromptLogprob], count: int) -> tuple[tuple[int, float], ...]:
    ordered = sorted(known.items(), key=lambda one: -one[1].logprob)[:count]
    return tuple((int(id), one.logprob) for id, one in ordered if one.logprob > _IMPOSSIBLE)


def events(data: bytes) -> Iterator[CompletionEvent]:
    """Parse complete server-sent events, in order. Raises `EngineError` if one reports an error."""
    for block in data.split(b"\n\n"):
        line = block.strip().removeprefix(b"data:").strip()
        if not line or line == _DONE:
            continue
        event = _decode(line)
        if event.error is not None:
            raise EngineError(f"vLLM: {error_message(line)}")
        yield event


def error_message(answer: bytes) -> str:
    """Return the message of an error response, in one line."""
    try:
        error = decode_json(answer)
        error = error.get("error", error.get("detail", error))
        message = error.get("message", error) if isinstance(error, dict) else error
    except (NotJson, AttributeError):
        message = decode_text(answer)
    return " ".join(str(message).split())[:1000]


def top(token: TokenLogprob, count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely tokens, in descending order."""
    likeliest = sorted(token.top_logprobs, key=lambda one: -one.logprob)[:count]
    return tuple((one.id, one.logprob) for one in likeliest if one.logprob > _IMPOSSIBLE)


def _bound_whitespace(grammar: str) -> str:
    """Return a grammar that bounds the whitespace of JSON by its separators.

    llguidance up to 1.8, which vLLM uses, repeats a `whitespace_pattern` without limit. Separators are patterns too.
    """

    def bounded(match: re.Match[str]) -> str:
        white = msgspec.json.decode(match[1])
        rules = {
            "whitespace_flexible": False,
            "item_separator": f"{white},{white}",
            "key_separator": f"{white}:{white}",
        }
        return '"x-guidance": ' + msgspec.json.encode(rules).decode()

    return _WHITESPACE.sub(bounded, grammar)
