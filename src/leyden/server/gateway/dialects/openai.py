"""What the dialects of OpenAI's API share: parameters, and how chunks, usage, logprobs and errors are written."""

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from leyden.records import Sampling
from leyden.server.gateway.dialects.base import AnswerWriter
from leyden.server.gateway.dialects.encoding import sampling_of, sse_event
from leyden.server.gateway.dialects.types import AnswerFinished, TokenInfo
from leyden.server.gateway.errors import STATUS, GatewayError

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class SamplingParameters(Struct, frozen=True, kw_only=True):
    """The parameters of sampling in chat and completions, with those that vLLM adds."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Return the sampling that the caller requests."""
        return sampling_of(self, max_tokens, [self.stop] if isinstance(self.stop, str) else self.stop)


class _StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class CallParameters(SamplingParameters, frozen=True, kw_only=True):
    """The parameters that chat and completions have in common."""

    model: str
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    @property
    def choices(self) -> int:
        """The choices of each prompt."""
        return self.n or 1

    @property
    def streams_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChunkWriter(AnswerWriter):
    """What the writers of chat and completions have in common: chunks, the usage, and how a stream ends."""

    def __init__(self, id: str, kind: str, model: str, choices: int, streams_usage: bool) -> None:
        """`choices` are those of each prompt."""
        self._head = {"id": id, "object": kind, "created": int(time.time()), "model": model}
        self._choices, self._streams_usage = choices, streams_usage
        self._finished: list[AnswerFinished] = []

    def stream_end(self) -> bytes:
        """Write the usage if the caller wants it, then `[DONE]`."""
        usage = self._event(choices=[], usage=self._usage()) if self._streams_usage else b""
        return usage + sse_event(b"[DONE]")

    def stream_error(self, error: GatewayError) -> bytes:
        """Write the error as the last event."""
        return sse_event(openai_error(error))

    def _write_chunk(self, choice: dict[str, Any]) -> bytes:
        usage: dict[str, None] = {"usage": None} if self._streams_usage else {}
        return self._event(choices=[choice], **usage)

    def _event(self, **fields: Any) -> bytes:
        return sse_event(msgspec.json.encode({**self._head, **fields}))

    def _usage(self) -> dict[str, Any]:
        """Sum up all prompts, each of which counts once, and all choices."""
        firsts = [finished for finished in self._finished if finished.choice % self._choices == 0]
        prompt = sum(finished.prompt_tokens for finished in firsts)
        completion = sum(finished.completion_tokens for finished in self._finished)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(finished.cached_tokens for finished in firsts)},
        }


def write_logprob(token: TokenInfo) -> dict[str, Any]:
    """Write a token with its alternatives, for chat and Responses."""
    top = [{"token": text, "logprob": logprob, "bytes": list(data)} for text, data, logprob in token.top]
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data), "top_logprobs": top}


def openai_error(error: GatewayError) -> bytes:
    """Return the JSON body of an error response."""
    status = STATUS[error.kind]
    kind = "rate_limit_error" if status == 429 else _TYPES.get(status, "server_error")
    return msgspec.json.encode(
        {"error": {"message": error.text, "type": kind, "param": error.param, "code": str(error.kind)}}
    )
