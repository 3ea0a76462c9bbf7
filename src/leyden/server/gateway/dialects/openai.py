"""What the dialects of OpenAI's API share: the parameters of sampling, and how logprobs and errors are written."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from leyden.records import Sampling
from leyden.server.gateway.dialects.types import TokenInfo
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
        given = {name: getattr(self, name) for name in Sampling.__struct_fields__ if name not in ("stop", "max_tokens")}
        if given["top_k"] == -1:
            given["top_k"] = 0
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Sampling(
            **{name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
            stop=tuple(text for text in stop if text),
        )


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
