"""What a learner and its ranks send each other: pickles on sockets that only they have."""

from typing import Any

from msgspec import Struct

from leyden.config import Config
from leyden.models.source import ModelSource

MAX_FRAME = (1 << 32) - 1
"""Bytes of a message: a parameter of a large model is one."""


class World(Struct, frozen=True):
    """The ranks that compute together, as one of them sees it."""

    rank: int
    size: int
    meeting: str
    """A path at which the ranks meet; there is no file yet."""
    timeout_s: float
    """How long a rank waits for the others in a collective."""


class RankSetup(Struct, frozen=True):
    """What the ranks train."""

    config: Config
    source: ModelSource
    dtype: str
    """The precision of forward passes."""
    critic: bool
    reference: bool


class RankReply(Struct, frozen=True):
    """What a call returned or raised."""

    value: Any = None
    error: Exception | None = None
    waited: bool = False
    """Whether it raised because another rank is gone or late."""
