"""How an attempt can end, and what each ending means.

Every attempt ends exactly once, with one of these. What follows from it (another attempt or not, a place in the
group's statistics or not, which reward) is read from the one table `MEANING` and decided nowhere else.
"""

from enum import StrEnum
from typing import Literal

import msgspec

from leyden.backoff import Backoff


class Ending(StrEnum):
    """The kinds of ending."""

    SUCCEEDED = "succeeded"
    AGENT_ERROR = "agent_error"
    TIMEOUT = "timeout"
    LOST = "lost"
    ENGINE_ERROR = "engine_error"
    NO_REWARD = "no_reward"
    CANCELLED = "cancelled"


class Outcome(msgspec.Struct, frozen=True):
    """An ending, with a message that tells a person what to do about it."""

    ending: Ending
    message: str = ""


class Retry(StrEnum):
    """At whose expense an attempt is repeated, where its ending says that it is: told by whoever saw it end."""

    CHARGED = "charged"
    """It is one of the rollout's `max_attempts`, and the next is not made at once (`RETRY_BACKOFF`)."""
    FREE = "free"
    """Nothing that the rollout did: it costs none of its attempts, and the next may be made at once."""
    ALONE = "alone"
    """Its process died, of this attempt or of another: the first time it is free, and the next has a process to itself.
    """


class Meaning(msgspec.Struct, frozen=True):
    """What follows from an ending."""

    retried: bool
    """Another attempt is made, as long as the rollout has attempts left."""
    counted: bool
    """The rollout takes part in its group's statistics."""
    scores: Literal["its reward", "failure_reward", "nothing"]
    """Where the value of the rollout comes from."""


MEANING: dict[Ending, Meaning] = {
    # An agent that fails because of what the model did must not fare better than one that answers wrongly, so its
    # failure counts; a failure of the machinery says nothing about the model, so it is repeated and then left out.
    Ending.SUCCEEDED: Meaning(retried=False, counted=True, scores="its reward"),
    Ending.AGENT_ERROR: Meaning(retried=False, counted=True, scores="failure_reward"),
    Ending.TIMEOUT: Meaning(retried=False, counted=True, scores="failure_reward"),
    Ending.LOST: Meaning(retried=True, counted=False, scores="nothing"),
    Ending.ENGINE_ERROR: Meaning(retried=True, counted=False, scores="nothing"),
    Ending.NO_REWARD: Meaning(retried=False, counted=False, scores="nothing"),
    Ending.CANCELLED: Meaning(retried=False, counted=False, scores="nothing"),
}

RETRY_BACKOFF = Backoff(first_s=0.5, max_s=60.0)
"""How long a rollout waits before its next attempt. The store keeps the time, so that a restarted server knows it."""
