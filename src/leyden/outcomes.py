"""How an attempt can end, and the consequences of each ending.

Every attempt ends exactly once. Whether it is retried, whether it counts in its group's statistics and which reward it
gets is defined by the table `MEANING` and nowhere else.
"""

import re
from enum import StrEnum
from typing import Literal

import msgspec

from leyden.backoff import Backoff


class Ending(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    AGENT_ERROR = "agent_error"
    TIMEOUT = "timeout"
    LOST = "lost"
    ENGINE_ERROR = "engine_error"
    NO_REWARD = "no_reward"
    CANCELLED = "cancelled"


class Outcome(msgspec.Struct, frozen=True):
    """An ending, with a message for the user."""

    ending: Ending
    message: str = ""


class Retry(StrEnum):
    """How a retry is charged, if the ending is retried. The component that saw the attempt end decides."""

    CHARGED = "charged"
    """The attempt counts against `max_attempts`, and the next one waits (`RETRY_BACKOFF`)."""
    FREE = "free"
    """The rollout did not cause the failure: the attempt is not counted, and the next may start at once."""
    FREE_ONCE = "free_once"
    """The engine crashed, perhaps because of a call of this attempt. Free for the rollout's first `engine_error`."""
    ALONE = "alone"
    """The host process died, perhaps because of this attempt. The first time is free; the next attempt runs alone."""


class Meaning(msgspec.Struct, frozen=True):
    """The consequences of an ending."""

    retried: bool
    """Another attempt is made while the rollout has attempts left."""
    counted: bool
    """The rollout counts in its group's statistics."""
    reward: Literal["given", "failure_reward", "none"]
    """Which final reward the rollout has: the one it was given, the run's `failure_reward`, or none."""


MEANING: dict[Ending, Meaning] = {
    # An agent that fails because of the model must not get a better reward than one that answers wrongly, so its
    # failure counts. An infrastructure failure says nothing about the model, so it is retried and then excluded.
    Ending.SUCCEEDED: Meaning(retried=False, counted=True, reward="given"),
    Ending.AGENT_ERROR: Meaning(retried=False, counted=True, reward="failure_reward"),
    Ending.TIMEOUT: Meaning(retried=False, counted=True, reward="failure_reward"),
    Ending.LOST: Meaning(retried=True, counted=False, reward="none"),
    Ending.ENGINE_ERROR: Meaning(retried=True, counted=False, reward="none"),
    Ending.NO_REWARD: Meaning(retried=False, counted=False, reward="none"),
    Ending.CANCELLED: Meaning(retried=False, counted=False, reward="none"),
}

_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\d+(?:\.\d+)?")
"""Parts of a message that differ between failures of the same kind: numbers, addresses and ids."""


def general_message(message: str) -> str:
    """Return the first line of a message, with numbers and ids replaced by #; messages of one cause are equal then."""
    return _VARIABLE.sub("#", message.strip().partition("\n")[0])[:500]


RETRY_BACKOFF = Backoff(first_s=0.5, max_s=60.0)
"""How long a rollout waits before its next attempt. The store keeps the time, so that a restarted server knows it."""
