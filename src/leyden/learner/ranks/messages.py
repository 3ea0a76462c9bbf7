"""What a learner and its ranks send each other: pickles on sockets that only they have."""

from typing import Any

from msgspec import Struct

from leyden.config import Config
from leyden.models.source import ModelSource

MAX_FRAME = (1 << 32) - 1
"""Bytes of a message: a parameter of a large model is one."""
FILES_TIMEOUT_S = 1800.0
"""How long ranks wait for one another when they start, and while a model or a checkpoint is read or written."""


class World(Struct, frozen=True):
    """What a rank must know of the ranks that it computes with."""

    rank: int
    size: int
    meeting: str
    """A path at which the ranks meet, where there is no file yet, or the HOST:PORT of a store of torch's."""
    timeout_s: float
    """How long a rank waits for the others in a collective."""
    address: str
    """The address of its machine, as other machines reach it."""
    device: int = 0
    """The number of its GPU, if there is any."""


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
