"""Answers every request with the same text, for side calls that need no model."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from msgspec import Struct

from leyden.server.gateway.dialects.types import GenerationRequest


class FixedAnswerSource(Struct, frozen=True):
    """The `AnswerSource` of a route to a fixed answer."""

    answer: str

    @property
    def policy(self) -> str:
        """The policy name of its recorded calls."""
        return "fixed"

    @asynccontextmanager
    async def chat(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """Yield an iterator over one whole completion with the answer in every choice."""
        yield self._whole(request.n)

    async def _whole(self, choices: int) -> AsyncIterator[dict[str, Any]]:
        message = {"role": "assistant", "content": self.answer}
        yield {"choices": [{"index": at, "message": message, "finish_reason": "stop"} for at in range(choices)]}
