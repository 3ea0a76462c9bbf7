"""Writes the `response` object: the request's parameters, the output, and how it ended."""

from typing import Any, Literal

from msgspec import Struct

from leyden.server.gateway.dialects.responses.ids import response_id
from leyden.server.gateway.dialects.responses.request import ResponseParameters
from leyden.server.gateway.dialects.responses.tools import is_left_out
from leyden.server.gateway.dialects.types import AnswerFinished

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseHead(Struct, frozen=True):
    """What stays the same in every object of one response."""

    call: str
    created: float
    request: ResponseParameters

    def write(
        self,
        status: Status,
        output: list[dict[str, Any]],
        *,
        finished: AnswerFinished | None = None,
        completed: float | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the response object in one of its states."""
        request = self.request
        return {
            "id": response_id(self.call),
            "object": "response",
            "created_at": int(self.created),
            "completed_at": int(completed) if completed is not None and status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": request.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {**(request.text or {}), "format": (request.text or {}).get("format") or {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [tool for tool in request.tools or () if not is_left_out(tool)],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": request.truncation or "disabled",
            "usage": _usage(finished) if finished is not None else None,
            "user": request.user,
        }


def _usage(finished: AnswerFinished) -> dict[str, Any]:
    return {
        "input_tokens": finished.prompt_tokens,
        "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": finished.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
        "total_tokens": finished.prompt_tokens + finished.completion_tokens,
    }
