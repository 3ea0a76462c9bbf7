"""The unified data interface: what one execution of an agent leaves behind.

A record never changes once made, and cannot hold nonsense: what is wrong raises where it is built. A call holds only
what it adds to the call before it, so a conversation takes space linear in its tokens; whole prompts, and transitions,
are views that `Episode` derives.
"""

import math
import re
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from leyden import defaults
from leyden.outcomes import Outcome

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@~-]*$(?!\n)"
ID_RULE = "letters, digits and . _ : @ ~ -, beginning with a letter or digit, 160 at the most"
Id = Annotated[str, Meta(pattern=ID_PATTERN, max_length=160, description=ID_RULE)]
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:@~/+-]*$(?!\n)", max_length=160, description="a short name")
]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Real = Annotated[float, Meta(ge=-1e30, le=1e30, description="a number; neither infinite nor NaN")]
SpanId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$", max_length=16)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e11, description="seconds since 1970")]


FREE = 0.99
"""A token that follows a grammar counts as chosen where the model gave this much to what the grammar allowed."""


class Purpose(StrEnum):
    """What a rollout is made for; only `train` ever reaches a gradient."""

    TRAIN = "train"
    EVAL = "eval"
    DEV = "dev"


class Version(Struct, frozen=True):
    """One published state of one policy's weights."""

    policy: Name
    number: Count


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How tokens were drawn. What is not said was not applied."""

    temperature: Real = 1.0
    top_p: Real = 1.0
    top_k: int = 0
    min_p: Real = 0.0
    presence_penalty: Real = 0.0
    frequency_penalty: Real = 0.0
    repetition_penalty: Real = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def biased(self) -> str | None:
        """Why the tokens are not an unbiased sample of the model; None if they are, at any temperature."""
        if self.temperature == 0:
            return "greedy sampling"
        if self.top_p < 1 or self.top_k > 0 or self.min_p > 0:
            return "truncated sampling"
        if self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1:
            return "penalised sampling"
        return None


class RunSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What the server needs to know of a run to look after its rollouts."""

    lease_s: Annotated[float, Meta(ge=0.1, le=86_400)] = defaults.LEASE_S
    """How long an attempt lives without a heartbeat."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = defaults.MAX_ATTEMPTS
    """Attempts of a rollout, the first included, before a retried ending becomes final."""
    failure_reward: Real = defaults.FAILURE_REWARD
    """What a rollout scores that ends as `agent_error` or `timeout`."""
    agent_rewards: bool = False
    """Whether the agent's own key may set rewards."""
    sampling: Sampling = Sampling()
    """How tokens are drawn in training rollouts, whatever the agent asks for."""
    allow_biased_sampling: bool = field(default=False, name="train_distorted")
    """Whether to train on calls sampled greedily, with truncation or with penalties; the wire keeps its old name."""
    history: Literal["template", "exact"] = "template"
    """Whether reasoning of earlier turns is shown as the model's template shows it, or always as it was sampled."""
    max_calls: Annotated[int, Meta(ge=1)] | None = None
    """Model calls of a rollout, so that a looping policy ends."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Sampled tokens of a rollout."""
    routes: dict[str, Name] = {}
    """Which policy, or `upstream`, serves which model name; empty: every name is the policy."""
    roles: dict[Name, str] = {}
    """By role, a regular expression that the system prompt of its calls matches; for agents that cannot say it."""

    def __post_init__(self) -> None:
        for role, rule in self.roles.items():
            try:
                re.compile(rule)
            except re.error as error:
                raise ValueError(f"`roles`: the rule of {role!r} is no regular expression: {error}") from error
        if self.sampling.biased and not self.allow_biased_sampling:
            raise ValueError(
                f"`sampling`: {self.sampling.biased} is not trained on, and this is the sampling of training rollouts: "
                "use temperature above 0 and no top_p, top_k, min_p or penalties, or set `train_distorted`"
            )


class Run(Struct, frozen=True):
    """A training or evaluation run: the scope of tasks, rollouts, versions and keys."""

    id: Id
    settings: RunSettings
    config: Any
    """The written-out configuration, as the user would write it."""
    created: Seconds


class Task(Struct, frozen=True, forbid_unknown_fields=True):
    """One row of the user's data: what an agent is given."""

    id: Id
    input: Any


class Group(Struct, frozen=True):
    """The rollouts of one task that are normalised together and stay in one optimiser step."""

    id: Id
    run: Id
    task: Id
    purpose: Purpose
    size: Count
    priority: int
    created: Seconds
    finished: Seconds | None = None


class State(StrEnum):
    """Where a rollout stands."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class Rollout(Struct, frozen=True):
    """One execution that was asked for; it may take several attempts, and ends once."""

    id: Id
    run: Id
    group: Id
    task: Id
    index: Count
    purpose: Purpose
    state: State
    attempts: Count
    max_attempts: Count
    created: Seconds
    finished: Seconds | None = None
    outcome: Outcome | None = None


class Attempt(Struct, frozen=True):
    """One try at a rollout by one worker, alive until its lease expires or it ends."""

    id: Id
    run: Id
    rollout: Id
    number: Count
    worker: Id
    pool: Id | None
    started: Seconds
    expires: Seconds
    ended: Seconds | None = None
    outcome: Outcome | None = None
    result: Any = None
    """What the agent returned."""

    @property
    def trace_id(self) -> str:
        """The W3C trace id under which this attempt's spans are found."""
        return trace_id(self.id)


def trace_id(attempt: str) -> str:
    """Derive an attempt's trace id from its identity, so that it needs no look-up on either side."""
    return blake2b(attempt.encode(), digest_size=16).hexdigest()


class PromptOrigin(StrEnum):
    """How the prompt of a call came about."""

    FRESH = "fresh"
    CONTINUED = "continued"
    RERENDERED = "rerendered"


class CallStatus(StrEnum):
    """Whether a call came to its end."""

    OK = "ok"
    ABANDONED = "abandoned"
    FAILED = "failed"


class VersionRun(Struct, frozen=True, array_like=True):
    """So many tokens in a row that were sampled by the same version."""

    tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    number: Count


class Call(Struct, frozen=True, omit_defaults=True):
    """One model call, as the difference to its parent.

    Its prompt is the first `kept_ids` of the parent's prompt and completion, followed by `prompt_ids`; likewise its
    messages. Further choices of one request name the first choice as their parent and keep just its prompt.
    """

    id: Id
    parent: Id | None = None
    kept_ids: Count = 0
    kept_messages: Count = 0
    retry_of: Id | None = None
    choice: Count = 0
    policy: Name = "policy"
    role: Name | None = None
    """As the call itself said, or a rule of the run; `Episode.role` also asks the spans."""
    span: SpanId | None = None
    """The span within which it was made."""
    made: PromptOrigin = PromptOrigin.FRESH
    made_why: str = ""
    status: CallStatus = CallStatus.OK
    finish: str = "stop"
    prompt_ids: tuple[Token, ...] = ()
    completion_ids: tuple[Token, ...] = ()
    logprobs: tuple[Real, ...] | None = None
    """Of each completion token, in the distribution it was drawn from; None where the engine could not say."""
    allowed: tuple[Share, ...] | None = None
    """Where there was a grammar, of each completion token: how likely the model thought all that it allowed there.

    0 where that was one token, or the engine could not say."""
    versions: tuple[VersionRun, ...] = ()
    sampling: Sampling = Sampling()
    messages: tuple[Any, ...] = ()
    response: Any = None
    tools: tuple[Any, ...] | None = None
    """The tools offered; None where they are the parent's."""
    request: Any = None
    """What else the caller asked for, as it was asked."""
    started: Seconds = 0.0
    ended: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.parent is None and (self.kept_ids or self.kept_messages):
            raise ValueError("`kept_ids` and `kept_messages` need a `parent` to keep them of")
        if self.parent == self.id or self.retry_of == self.id:
            raise ValueError("`parent` and `retry_of` name another call, not the call itself")
        if self.logprobs is not None:
            if len(self.logprobs) != len(self.completion_ids):
                raise ValueError(
                    f"`logprobs` has {len(self.logprobs)} entries for {len(self.completion_ids)} completion_ids"
                )
            if not all(map(math.isfinite, self.logprobs)):
                raise ValueError("`logprobs` must be finite numbers")
        if self.allowed is not None and len(self.allowed) != len(self.completion_ids):
            raise ValueError(f"`allowed` has {len(self.allowed)} entries for {len(self.completion_ids)} completion_ids")
        if self.versions and sum(run.tokens for run in self.versions) != len(self.completion_ids):
            raise ValueError("`versions` must cover every completion id once")

    @property
    def chosen(self) -> Sequence[int]:
        """The places in the completion whose tokens the model chose; a grammar chose the others."""
        if self.allowed is None:
            return range(len(self.completion_ids))
        return [place for place, share in enumerate(self.allowed) if share >= FREE]

    @property
    def unusable(self) -> str | None:
        """Why no gradient can come from this call; None where one can."""
        if self.status is not CallStatus.OK:
            return str(self.status)
        if not self.completion_ids:
            return "no tokens"
        if self.logprobs is None:
            return "no logprobs"
        if not self.chosen:
            return "chosen by a grammar"
        return None

    @property
    def untrainable(self) -> str | None:
        """Why no gradient may come from this call unless its run allows biased sampling; None if it may."""
        return self.unusable or self.sampling.biased


class RewardKind(StrEnum):
    """`final` for the whole attempt, `step` given on the way, `automatic` read off what happened."""

    FINAL = "final"
    STEP = "step"
    AUTOMATIC = "automatic"


class Reward(Struct, frozen=True, omit_defaults=True):
    """A number somebody gave: to a call, to a span, or (neither named) to the attempt."""

    id: Id
    value: Real
    kind: RewardKind = RewardKind.FINAL
    name: Name = "reward"
    weight: Real = 1.0
    source: Name = "agent"
    call: Id | None = None
    span: SpanId | None = None
    at: Seconds = 0.0
    why: str = ""
    """What it is for, in words; an automatic reward says by what it is known."""

    def __post_init__(self) -> None:
        for name in ("value", "weight"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"`{name}` must be a finite number")
        if self.call is not None and self.span is not None:
            raise ValueError("a reward belongs to a `call` or to a `span`, not to both")
        if self.kind is RewardKind.FINAL and (self.call or self.span):
            raise ValueError("a final reward belongs to the attempt: name neither `call` nor `span`")


class Span(Struct, frozen=True, omit_defaults=True):
    """One OpenTelemetry span, as it came over OTLP."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: str
    start_ns: int
    end_ns: int
    status: Literal["unset", "ok", "error"] = "unset"
    status_message: str = ""
    attributes: dict[str, Any] = {}
    events: tuple[Any, ...] = ()
    links: tuple[Any, ...] = ()
    scope: str = ""
    resource: dict[str, Any] = {}

    @property
    def role(self) -> str | None:
        """Which part of an agent it says that it belongs to."""
        said = {**_metadata(self.attributes.get("metadata")), **self.attributes}
        found = (said.get(name) for name in ROLE_ATTRIBUTES)
        return next((role for role in found if isinstance(role, str) and role), None)


def _metadata(text: Any) -> dict[str, Any]:
    """OpenInference keeps what LangChain and LangGraph know of a run in one attribute, as JSON."""
    if not isinstance(text, str):
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


ROLE_ATTRIBUTES = (
    "leyden.role",
    "gen_ai.agent.name",
    "agent.name",
    "graph.node.id",
    "langgraph.node",
    "lc_agent_name",
    "langgraph_node",
)
"""Where spans say which part of an agent they belong to, the surest first."""


class Worker(Struct, frozen=True):
    """A process that leases rollouts."""

    id: Id
    seen: Seconds
    attempts: Count = 0
    """How many of its attempts are alive."""


class Metric(Struct, frozen=True):
    """One number of a run at one step."""

    step: Count
    name: Name
    value: float
    at: Seconds = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError("`value` must be a finite number")


class EventKind(StrEnum):
    """What an event of a run's log reports."""

    RUN_CREATED = "run.created"
    RUN_DELETED = "run.deleted"
    GROUP_QUEUED = "group.queued"
    GROUP_FINISHED = "group.finished"
    ROLLOUT_QUEUED = "rollout.queued"
    ROLLOUT_FINISHED = "rollout.finished"
    ATTEMPT_STARTED = "attempt.started"
    ATTEMPT_ENDED = "attempt.ended"
    ATTEMPT_LATE = "attempt.late"
    ATTEMPT_REWARDED = "attempt.rewarded"
    ATTEMPT_UNREWARDED = "attempt.unrewarded"
    SCORING_QUEUED = "scoring.queued"
    SCORING_STARTED = "scoring.started"
    SCORING_LATE = "scoring.late"
    VERSION_PUBLISHED = "version.published"
    METRICS = "metrics"


class Event(Struct, frozen=True):
    """One line of a run's log: something changed. Events are only ever added, and `seq` only grows."""

    seq: int
    run: str
    kind: EventKind
    subject: str
    at: Seconds
    data: dict[str, Any] = msgspec.field(default_factory=dict)
