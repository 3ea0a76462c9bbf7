"""Requests and replies of the control API, besides the records.

The server and its clients (workers, trainer, command line) share these types and nothing else.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from leyden.outcomes import Outcome, Retry
from leyden.patterns import PatternError, check_rule
from leyden.process.usage import ResourceUse
from leyden.records import (
    ID_PATTERN,
    Attempt,
    Count,
    Event,
    GivenReward,
    Group,
    Id,
    Metric,
    Name,
    Origin,
    Purpose,
    Real,
    Reward,
    Rollout,
    RunSettings,
    Seconds,
    State,
    Task,
)

Wait = Annotated[float, Meta(ge=0, le=300, description="seconds to wait for a result")]
RUN_ENDED = "run_ended"
"""The reason of a refused lease if the run is done, so that its workers can end."""
PageLimit = Annotated[int, Meta(ge=1, le=1000, description="maximum number of rows")]


class RunSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A run to create."""

    id: Id
    settings: RunSettings = RunSettings()
    config: Any = None

    def __post_init__(self) -> None:
        for role, rule in self.settings.roles.items():
            try:
                check_rule(rule)
            except PatternError as error:
                raise ValueError(f"`roles`: the rule of {role!r} cannot be used: {error}") from error


class GroupSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A group to enqueue: `size` rollouts of one task, named `<id>.0`, `<id>.1`, and so on."""

    id: Annotated[str, Meta(pattern=ID_PATTERN, max_length=140)]
    task: Task
    size: Annotated[int, Meta(ge=1, le=10_000)] = 1
    purpose: Purpose = Purpose.TRAIN
    priority: Annotated[int, Meta(ge=-10, le=10, description="each step doubles the group's share")] = 0
    max_attempts: Annotated[int, Meta(ge=1, le=100)] | None = None
    """None: the run's."""
    step: Count | None = None
    """The step of the training that requests the group."""
    origin: Origin | None = None
    """What every rollout of the group replays: an attempt of the same run and task; to train on, one to train on."""


class LeaseRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker requests rollouts. The reply comes as soon as there is one, or empty after `wait` seconds."""

    worker: Id
    count: Annotated[int, Meta(ge=1, le=1000)] = 1
    wait: Wait = 0.0
    run: Id | None = None
    """None: any run that the key gives access to."""
    pool: Id | None = None
    """The pool of the process that will run the attempts; its pool key is valid for them."""
    use: ResourceUse | None = None
    """What the worker and its agents use; None if that was measured a moment ago."""


class Lease(Struct, frozen=True, tag="run"):
    """A leased attempt, with everything its agent needs. A Python agent gets it as its `attempt` parameter.

    The worker sends it as a message to the process that is to run it.
    """

    attempt: Attempt
    task: Task
    purpose: Purpose
    lease_s: float
    key: str
    """Key of the attempt, for its model calls and spans; valid until the attempt ends. A Python agent sees the key of
    its process."""
    url: str
    """URL at which the agent reaches the server."""
    traceparent: str
    alone: bool = False
    """Run this attempt alone in a process, because an earlier attempt's process died."""
    services: dict[str, str] = {}
    """Addresses of the services that the worker has acquired for it, by name."""

    @property
    def id(self) -> str:
        """The attempt's id."""
        return self.attempt.id

    @property
    def rollout(self) -> str:
        """The rollout's id."""
        return self.attempt.rollout

    @property
    def run(self) -> str:
        """The run's id."""
        return self.attempt.run

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients."""
        return f"{self.url}/v1"


class HeartbeatRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The attempts that a worker is still running."""

    attempts: Annotated[tuple[Id, ...], Meta(max_length=10_000)]


class EndedAttempt(Struct, frozen=True):
    """An attempt that the worker must stop. `outcome` is None if the server does not know the attempt."""

    attempt: str
    outcome: Outcome | None


class HeartbeatReply(Struct, frozen=True):
    """New expiry times of the renewed leases, and the attempts that have ended."""

    expires: dict[str, Seconds]
    ended: tuple[EndedAttempt, ...]


class FinishRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Report that an attempt ended. Its rewards are recorded in the same transaction."""

    outcome: Outcome
    result: Any = None
    rewards: tuple[Reward, ...] = ()
    output: Annotated[str, Meta(max_length=1 << 20)] = ""
    """What the agent printed; the sender truncates it."""
    retry: Retry = Retry.CHARGED
    """How a retry is charged, if the ending is retried."""
    awaits_group: bool = False
    """The attempt succeeded and gets its final reward when its whole group is scored."""


class FinishReply(Struct, frozen=True):
    """Reply to a finish. `counted` is False if the attempt had already ended with `outcome`."""

    counted: bool
    outcome: Outcome
    rollout: Rollout
    queue_pressure: Annotated[float, Meta(ge=0)] | None = None
    """Model calls waiting for the engine per call that is running; None if unknown."""


class TimeoutRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker reports that an attempt has run for as long as its time limit, or longer."""

    ran_s: Annotated[float, Meta(ge=0)]
    """How long the attempt has run, by the worker's clock."""
    limit_s: Annotated[float, Meta(gt=0)]
    """Its time limit, in which the time that its calls waited for the model does not count."""


class TimeoutReply(Struct, frozen=True):
    """How much time the attempt has left. If it is 0, its model calls have been cut, and it gets no more."""

    left_s: float


class ScoringRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker requests a group to score. The reply comes as soon as there is one, or empty after `wait` seconds."""

    worker: Id
    wait: Wait = 0.0
    run: Id | None = None
    """None: any run that the key gives access to."""


class GroupScoring(Struct, frozen=True):
    """A leased group to score. All its rollouts have ended."""

    group: Group
    number: Count
    """Number of the lease. Reports under an earlier number have no effect."""
    lease_s: float


class ScoringHeartbeat(Struct, frozen=True, forbid_unknown_fields=True):
    """Renew the lease of a group scoring."""

    number: Count


class Scores(Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a group scoring. Rollouts without a reward here end as `no_reward`, with the message."""

    number: Count
    rewards: dict[Id, GivenReward | None] = {}
    """By rollout."""
    message: str = ""
    given_back: bool = False
    """The group was not scored; another worker may lease it."""
    weights: dict[Name, Real] = {}
    """Of the parts that rewards have."""


class Counted(Struct, frozen=True):
    """Whether a report was made under the current lease. Late reports are logged and have no effect."""

    counted: bool


class Existence(Struct, frozen=True):
    """Whether there is a run of this name."""

    exists: bool


class Recorded(Struct, frozen=True):
    """Number of records that are new. The others were already stored with the same content."""

    new: Count


class HoldReply(Struct, frozen=True):
    """Model calls are held until the next version of their policy is published."""

    waiting: int
    """Calls that wait for the engine already."""


class CallTimes(Struct):
    """Seconds that the model calls of a run took in the server, added up since it started.

    Calls that run at the same time each count in full.
    """

    total_s: float = 0.0
    """From the decoded request to the last event of the answer."""
    queued_s: float = 0.0
    """Waiting for a slot of the engine, and while the weights changed."""
    prompt_s: float = 0.0
    """From the slot to the first token."""
    decoding_s: float = 0.0
    """From the first token to the last."""
    store_s: float = 0.0
    """Waiting until the call was durable."""

    def since(self, earlier: "CallTimes") -> "CallTimes":
        """Return what was added after an earlier reading; everything, if the server has started again since."""
        if self.total_s < earlier.total_s:
            return self
        return CallTimes(*(getattr(self, name) - getattr(earlier, name) for name in self.__struct_fields__))


class CancelReply(Struct, frozen=True):
    """Number of cancelled rollouts. Finished rollouts do not change."""

    cancelled: Count


KEY_PREFIX = "leyden-"
"""How every key begins."""
MAX_KEY_TTL_S = 10 * 365 * 86_400.0
"""The longest time that a key can be valid for."""


class KeySpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A key to create. Attempt keys come with leases and cannot be requested."""

    kind: Annotated[str, Meta(pattern="^(admin|worker|pool|viewer|client)$")]
    run: Id | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_KEY_TTL_S)] = 30 * 86_400.0


class NewKey(Struct, frozen=True):
    """A new key. It is shown once; the server does not store it."""

    key: str
    expires: Seconds
    pool: Id | None = None
    """Name of the new pool, to be used in lease requests."""


class RolloutPage(Struct, frozen=True, forbid_unknown_fields=True):
    """A page of a run's rollouts: up to `limit` after the rollout `after`."""

    after: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:@~-]*$(?!\n)", max_length=160)] = ""
    limit: PageLimit = 100
    state: State | None = None


class Cursor(Struct, frozen=True, forbid_unknown_fields=True):
    """Position in a log: the reader has everything up to `after`."""

    after: Annotated[int, Meta(ge=0, le=2**62)] = 0
    limit: PageLimit = 1000


class EventCursor(Cursor, frozen=True, forbid_unknown_fields=True):
    """Position in a run's events, of one kind or all. The reply waits up to `wait` seconds for an event."""

    wait: Wait = 0.0
    kind: Annotated[str, Meta(pattern=r"^[a-z.]*$(?!\n)", max_length=40)] = ""


class EventLog(Struct, frozen=True):
    """Events after a cursor, and the next cursor."""

    events: tuple[Event, ...]
    after: int


class Metrics(Struct, frozen=True):
    """Metrics after a cursor, and the next cursor."""

    metrics: tuple[Metric, ...]
    after: int


class ListedRollout(Rollout, frozen=True):
    """A rollout in a list, with its reward and the calls of its last attempt."""

    reward: float | None = None
    """Final reward by the outcome table, `failure_reward` included; None if it has none."""
    calls: Count | None = None
    """Number of model calls; None while unfinished, and if it was cancelled before any attempt."""
    tokens: Annotated[int, Meta(ge=0)] | None = None
    """Number of sampled tokens; None if `calls` is."""


class RolloutDetail(Struct, frozen=True):
    """A rollout with its task and all its attempts."""

    rollout: Rollout
    task: Task
    attempts: tuple[Attempt, ...]


class RunSummary(Struct, frozen=True):
    """Counts and mean reward of a run."""

    id: Id
    created: Seconds
    rollouts: dict[str, int]
    """Counts by state; finished rollouts by ending."""
    groups: Count
    groups_finished: Count
    calls: Count
    tokens: Annotated[int, Meta(ge=0)]
    """Number of sampled tokens."""
    mean_reward: float | None
    """Mean final reward of the rollouts that have one; failures have the run's `failure_reward`."""
    groups_unscored: Count = 0
    """Groups whose rollouts have ended and that wait for a group scoring."""
