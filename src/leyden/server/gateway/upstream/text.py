"""Requests that continue a text, for an upstream's /v1/completions, and its answers as chunks of a chat."""

from collections.abc import AsyncIterator
from typing import Any

from leyden.server.gateway.dialects.types import GenerationRequest
from leyden.server.gateway.errors import invalid


def text_of(request: GenerationRequest) -> str:
    """Return the text that a request continues; raise for token ids, which are those of the policy's tokenizer."""
    if isinstance(request.prompt, str):
        return request.prompt
    raise invalid(f"{request.model!r} is not a policy, and has another tokenizer: send the prompt as text", "prompt")


def text_body(request: GenerationRequest) -> dict[str, Any]:
    """Return the fields of a request for a completion, without those of its sampling.

    The prompt is echoed only for its logprobs. Such an answer is not streamed, so that prompt and completion can be
    separated by the number of tokens in the prompt.
    """
    body: dict[str, Any] = {"model": request.model, "prompt": text_of(request), "n": request.n}
    if request.top_logprobs is not None:
        body["logprobs"] = request.top_logprobs
    if request.prompt_logprobs:
        body["echo"] = True
    elif request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


async def as_chat(chunks: AsyncIterator[dict[str, Any]], request: GenerationRequest) -> AsyncIterator[dict[str, Any]]:
    """Convert the chunks of a completion. A choice has the tokens of its prompt as `prompt`, if they were echoed."""
    async for chunk in chunks:
        prompt_tokens = (chunk.get("usage") or {}).get("prompt_tokens") or 0
        choices = []
        for choice in chunk.get("choices") or ():
            text, tokens = choice.get("text") or "", _tokens(choice.get("logprobs") or {})
            converted = {name: choice.get(name) for name in ("index", "finish_reason") if choice.get(name) is not None}
            if request.prompt_logprobs:
                text = text.removeprefix(text_of(request))
                converted["prompt"] = tokens[:prompt_tokens]
                tokens = tokens[prompt_tokens:]
            choices.append({**converted, "delta": {"content": text}, "logprobs": {"content": tokens}})
        yield {**chunk, "choices": choices}


def _tokens(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert the four lists of a completion's logprobs to one list."""
    tokens = logprobs.get("tokens") or []
    values = logprobs.get("token_logprobs") or [None] * len(tokens)
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    offsets = logprobs.get("text_offset") or [0] * len(tokens)
    return [
        {
            "token": token,
            "logprob": value,
            "top_logprobs": [{"token": name, "logprob": other} for name, other in (top or {}).items()],
            "offset": offset,
        }
        for token, value, top, offset in zip(tokens, values, tops, offsets, strict=True)
    ]
