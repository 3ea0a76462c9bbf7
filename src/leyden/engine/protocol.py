"""Tokens in, tokens out. An engine knows nothing of messages, agents or training.

Whoever asks closes the stream to cancel. The logprobs are those of the distribution that a token was drawn from,
temperature and grammar applied; each piece names the version of the weights that drew it.
"""

import os
from collections.abc import AsyncGenerator
from typing import Literal, Protocol

from msgspec import Struct

from leyden.records import Sampling

# torch's threads spin while they wait for each other. On cores that agents, engine and trainer share, one that runs
# burns its core waiting for one that does not. They wait asleep, unless the user says otherwise; it has to be said
# before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

FinishReason = Literal["stop", "length"]


class EngineRequest(Struct, frozen=True):
    """What an engine is asked for: one completion."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    """Drawing one of these ends the completion, and is part of it."""
    max_tokens: int
    session: str
    """Requests of one session share prefixes: an engine may keep what it computed for them."""
    top_logprobs: int = 0
    grammar: str | None = None
    """What the completion has to follow; see `leyden.engine.grammar`."""


class TokenChunk(Struct, frozen=True):
    """Some tokens, as they were drawn. The last piece says why there are no more."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the likeliest ones with their logprobs, where they were asked for."""
    allowed: tuple[float, ...] = ()
    """For each token, where there is a grammar: how likely all those were that it left to choose from, 0 for one."""
    finish: FinishReason | None = None


class EngineError(Exception):
    """The engine failed; the message says how."""


class Engine(Protocol):
    """Anything that can complete."""

    @property
    def context(self) -> int:
        """The longest sequence, prompt and completion together."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Draw a completion, piece by piece."""

    def forget(self, session: str) -> None:
        """Let go of what is kept for a session: no more requests of it will come. It may be told more than once."""
