"""What travels over the control API beside the records themselves: the bodies of its requests and replies.

The server and everything that talks to it (workers, trainers, the command line) share these and nothing else.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from leyden.outcomes import Outcome, Retry
from leyden.records import (
    ID_PATTERN,
    Attempt,
    Count,
    Event,
    Group,
    Id,
    Metric,
    Purpose,
    Real,
    Reward,
    Rollout,
    RunSettings,
    Seconds,
    State,
    Task,
)

Wait = Annotated[float, Meta(ge=0, le=300, description="seconds to wait for something to report")]
PageLimit = Annotated[int, Meta(ge=1, le=1000, description="how many rows at the most")]


class RunSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A run to create."""

    id: Id
    settings: RunSettings = RunSettings()
    config: Any = None


class GroupSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A group to enqueue: `size` rollouts of one task, named `<id>.0`, `<id>.1`, and so on."""

    id: Annotated[str, Meta(pattern=ID_PATTERN, max_length=140)]
    task: Task
    size: Annotated[int, Meta(ge=1, le=10_000)] = 1
    purpose: Purpose = Purpose.TRAIN
    priority: Annotated[int, Meta(ge=-10, le=10, description="each step doubles the group's share")] = 0
    max_attempts: Annotated[int, Meta(ge=1, le=100)] | None = None
    """None: the run's."""


class LeaseRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker asks for work; the reply comes as soon as there is some, or empty after `wait` seconds."""

    worker: Id
    count: Annotated[int, Meta(ge=1, le=1000)] = 1
    wait: Wait = 0.0
    run: Id | None = None
    """None: any run that the key may serve."""
    pool: Id | None = None
    """The process that will host the attempts; its pool key is valid for them."""


class Lease(Struct, frozen=True):
    """An attempt to make, and all that its agent needs."""

    attempt: Attempt
    task: Task
    purpose: Purpose
    lease_s: float
    key: str
    """The attempt's own key: for its model calls and its spans, until it ends."""
    url: str
    """Where the agent reaches the server."""
    traceparent: str
    alone: bool = False
    """An attempt before it died with its process: this one is to have a process to itself."""


class HeartbeatRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker says which attempts it is still at."""

    attempts: Annotated[tuple[Id, ...], Meta(max_length=10_000)]


class EndedAttempt(Struct, frozen=True):
    """An attempt that its worker should stop, and why; no outcome where the server does not know the attempt."""

    attempt: str
    outcome: Outcome | None


class HeartbeatReply(Struct, frozen=True):
    """Every attempt that is not listed lives on until `expires`."""

    expires: dict[str, Seconds]
    ended: tuple[EndedAttempt, ...]


class FinishRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """An attempt is over. Its last rewards may come along, and are recorded with it or not at all."""

    outcome: Outcome
    result: Any = None
    rewards: tuple[Reward, ...] = ()
    output: Annotated[str, Meta(max_length=1 << 20)] = ""
    """What the agent printed; bounded by whoever sends it."""
    retry: Retry = Retry.CHARGED
    """At whose expense it is repeated, if its ending says that it is."""
    awaits_group: bool = False
    """A success whose final reward comes when its whole group is scored together."""


class FinishReply(Struct, frozen=True):
    """What became of a finish: `counted` is False where the attempt had ended before, as `outcome` says."""

    counted: bool
    outcome: Outcome
    rollout: Rollout
    crowding: Annotated[float, Meta(ge=0)] | None = None
    """How many model calls wait for a place in the engine for each that has one; None where that says nothing."""


class ScoringRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker asks for a group to score; the reply comes as soon as there is one, or empty after `wait` seconds."""

    worker: Id
    wait: Wait = 0.0
    run: Id | None = None
    """None: any run that the key may serve."""


class GroupScoring(Struct, frozen=True):
    """A group to score, whose rollouts have all ended; a worker's until its lease runs out or it is scored."""

    group: Group
    number: Count
    """Of the lease: a report under an earlier one changes nothing."""
    lease_s: float


class ScoringHeartbeat(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker says that it is still at a scoring."""

    number: Count


class Scores(Struct, frozen=True, forbid_unknown_fields=True):
    """What came of a scoring. Rollouts that have no number here end as `no_reward`, with the message."""

    number: Count
    rewards: dict[Id, Real | None] = {}
    """By rollout."""
    message: str = ""
    given_back: bool = False
    """It was not scored, and another worker may do it."""


class Counted(Struct, frozen=True):
    """Whether a report was of the lease in force; another is in the log and changes nothing."""

    counted: bool


class Recorded(Struct, frozen=True):
    """How many of the records sent are new; the others were there already, the same."""

    new: Count


class HoldReply(Struct, frozen=True):
    """Model calls are held until the next version of their policy is published."""

    waiting: int
    """Calls that wait for the engine already."""


class CancelReply(Struct, frozen=True):
    """How many rollouts were cancelled; finished ones stay as they were."""

    cancelled: Count


class KeySpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A key to make. Attempt keys come with leases and cannot be asked for."""

    kind: Annotated[str, Meta(pattern="^(admin|worker|pool|viewer)$")]
    run: Id | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=10 * 365 * 86_400)] = 30 * 86_400.0


class NewKey(Struct, frozen=True):
    """A key, shown once: the server does not keep it."""

    key: str
    expires: Seconds
    pool: Id | None = None
    """The name of the new pool, to ask for leases with."""


class Page(Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of a list to show: what follows `after`, in the list's own order."""

    after: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:@~-]*$(?!\n)", max_length=160)] = ""
    limit: PageLimit = 100


class RolloutPage(Page, frozen=True, forbid_unknown_fields=True):
    """Which part of a run's rollouts to show."""

    state: State | None = None


class Cursor(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a reader of a log stands: it has seen everything up to `after`."""

    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    limit: PageLimit = 1000


class EventCursor(Cursor, frozen=True, forbid_unknown_fields=True):
    """A cursor into a run's log, of one kind of event or all; with nothing to tell yet, the reply waits."""

    wait: Wait = 0.0
    kind: Annotated[str, Meta(pattern=r"^[a-z.]*$(?!\n)", max_length=40)] = ""


class EventLog(Struct, frozen=True):
    """Events after a cursor, and the cursor to ask with next."""

    events: tuple[Event, ...]
    after: int


class Metrics(Struct, frozen=True):
    """Numbers after a cursor, and the cursor to ask with next."""

    metrics: tuple[Metric, ...]
    after: int


class ListedRollout(Rollout, frozen=True):
    """A rollout in a list, with what came of its last attempt."""

    reward: float | None = None
    """The final reward; None where it has none, or has one only as a failure."""
    calls: Count | None = None
    """Model calls; None until it is finished, and where it was cancelled before anybody tried it."""


class RolloutDetail(Struct, frozen=True):
    """A rollout with its task and all its attempts."""

    rollout: Rollout
    task: Task
    attempts: tuple[Attempt, ...]


class RunSummary(Struct, frozen=True):
    """What a run holds, in numbers."""

    id: Id
    created: Seconds
    rollouts: dict[str, int]
    """By state, finished ones by ending."""
    groups: Count
    groups_finished: Count
    calls: Count
    tokens: Annotated[int, Meta(ge=0)]
    """Sampled tokens."""
    mean_reward: float | None
    """Mean final reward of the rollouts that have one."""
    groups_unscored: Count = 0
    """Those whose rollouts are over, and that wait to be scored together."""
