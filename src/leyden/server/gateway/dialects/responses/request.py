"""Reads the parameters of a request to /v1/responses."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from leyden.server.gateway.dialects.types import Format
from leyden.server.gateway.errors import invalid

ENCRYPTED_REASONING = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
_UNSUPPORTED = {
    "background": "responses are generated while the caller waits: leave it out",
    "context_management": "conversations are not summarised here: send the items to keep",
    "conversation": "conversations are not kept under their own id: use previous_response_id, or send all items",
    "prompt": "prompt templates are not kept here: send instructions and input",
}


class PromptParameters(Struct, frozen=True):
    """The parameters that make up the prompt. Every one may be null; others are recorded and ignored."""

    model: str = ""
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    conversation: Any = None
    prompt: Any = None

    @property
    def reasons(self) -> bool | None:
        """Whether the caller switches reasoning on or off."""
        effort = (self.reasoning or {}).get("effort")
        return None if effort is None else effort != "none"


class ResponseParameters(PromptParameters, frozen=True):
    """All parameters of a request that the gateway reads or that a response repeats."""

    stream: bool | None = None
    store: bool | None = None
    include: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    background: bool | None = None
    context_management: Any = None

    @property
    def logprobs(self) -> int | None:
        """How many alternatives to return with each token; None returns no logprobs."""
        wanted = self.top_logprobs or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None

    @property
    def summarises_reasoning(self) -> bool:
        """Whether the client reads reasoning as a summary."""
        reasoning = self.reasoning or {}
        return bool(reasoning.get("summary") or reasoning.get("generate_summary"))


def check_supported(request: PromptParameters) -> None:
    """Raise for a parameter that cannot be honoured."""
    if request.truncation not in (None, "auto", "disabled"):
        raise invalid("truncation is auto or disabled", "truncation")
    for name, why in _UNSUPPORTED.items():
        if getattr(request, name, None):
            raise invalid(why, name)


def read_format(text: dict[str, Any] | None) -> Format | None:
    """Read the format of the answer from `text`."""
    match (text or {}).get("format"):
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema", "schema": dict() as schema, **other}:
            named = {name: value for name, value in other.items() if value is not None}
            return {"type": "json_schema", "json_schema": {"name": "answer", **named, "schema": schema}}
    raise invalid("an answer is text, a json_object, or what the schema of a json_schema says", "text.format")
