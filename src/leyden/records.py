"""The records of the unified data interface: runs, tasks, rollouts, attempts, calls, rewards, spans and events.

Records are immutable and validated when they are built. A call stores only what it adds to its parent call, so a
conversation takes space linear in its tokens; `Episode` derives whole prompts and transitions.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from leyden import defaults
from leyden.decoding import decode_object
from leyden.outcomes import Outcome

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@~-]*$(?!\n)"
ID_CHARACTERS = "letters, digits and . _ : @ ~ -, beginning with a letter or digit"
ID_RULE = f"{ID_CHARACTERS}, 160 at the most"
Id = Annotated[str, Meta(pattern=ID_PATTERN, max_length=160, description=ID_RULE)]
Name = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:@~/+-]*$(?!\n)", max_length=160, description="a short name")
]
MetricName = Annotated[
    str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]+$(?!\n)", max_length=200, description="text without control characters")
]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Token = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Real = Annotated[float, Meta(ge=-1e30, le=1e30, description="a number; neither infinite nor NaN")]
SpanId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$", max_length=16)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0, le=1e11, description="seconds since 1970")]


MIN_ALLOWED_MASS = 0.99
"""A constrained token is trained on if the model gave at least this probability to the tokens the grammar allowed."""


class Purpose(StrEnum):
    """Purpose of a rollout. Only `train` rollouts contribute gradients."""

    TRAIN = "train"
    EVAL = "eval"
    TEST = "test"
    """The evaluation on the test tasks when the training is done."""
    DEV = "dev"


class Version(Struct, frozen=True):
    """One published state of one policy's weights."""

    policy: Name
    number: Count


DEFAULT_POLICY = "policy"
"""Name of the policy of a run that names none."""


class Sampling(Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of a call. Defaults mean that the parameter was not applied."""

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


class FixedAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The target of a route whose calls get the same answer without a model."""

    answer: str


Schedule = Annotated[dict[AtLeastOne, AtLeastOne], Meta(min_length=1)]
"""By the step from which it applies, a limit of the rollouts of a training."""


def scheduled(schedule: Schedule, step: int | None) -> int:
    """Return the limit at a step, before the first one that is named the first; None: the last one."""
    begun = [first for first in schedule if step is None or first <= step]
    return schedule[max(begun, default=min(schedule))]


class RunSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a run that the server and the gateway apply to its rollouts."""

    lease_s: Annotated[float, Meta(ge=0.1, le=86_400)] = defaults.LEASE_S
    """How long an attempt lives without a heartbeat."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = defaults.MAX_ATTEMPTS
    """Attempts of a rollout, the first included, before a retryable ending becomes final."""
    failure_reward: Real = defaults.FAILURE_REWARD
    """Reward of a rollout that ends as `agent_error` or `timeout`."""
    agent_rewards: bool = False
    """Whether agents may set rewards with their own key."""
    reward_function: bool = False
    """Whether a reward function sets the final reward: agents then cannot."""
    sampling: Sampling = Sampling()
    """Sampling of training rollouts; it replaces what the agent requests."""
    completion_tokens: Schedule | None = None
    """The most tokens of a completion, if `sampling.max_tokens` depends on the step."""
    allow_biased_sampling: bool = False
    """Whether to train on calls sampled greedily, with truncation or with penalties."""
    history: Literal["template", "exact"] = "template"
    """Whether earlier turns are rendered by the model's template, which may drop reasoning, or exactly as sampled."""
    reasoning: bool | None = None
    """Whether the model reasons before it answers, if its template can switch that; None: as the agent requests."""
    tool_calls: Literal["marked", "any"] = "marked"
    """What is a tool call: only text in the marks of the model's template, or also JSON that ends an answer."""
    max_calls: AtLeastOne | Schedule | None = None
    """Limit of model calls per rollout, so that a looping policy ends."""
    max_tokens: AtLeastOne | None = None
    """Limit of sampled tokens per rollout."""
    replay: bool = True
    """Whether a retry, or a rollout with an origin, gets its first answers from the record."""
    routes: dict[str, Name | FixedAnswer] = {}
    """Maps model names, in which `*` stands for any text, to a policy, to `upstream` or to a fixed answer.

    If empty, the policy serves every name.
    """
    roles: dict[Name, str] = {}
    """Maps roles to a regular expression on the system prompt, for agents that do not name roles themselves."""
    role_routes: dict[Name, Name] = {}
    """Maps roles to the policy that answers their calls, or to `upstream`, whatever model they request."""

    def __post_init__(self) -> None:
        if self.sampling.biased and not self.allow_biased_sampling:
            raise ValueError(
                f"`sampling`: {self.sampling.biased} is not trained on, and this is the sampling of training rollouts: "
                "use temperature above 0 and no top_p, top_k, min_p or penalties, or set `allow_biased_sampling`"
            )

    def at(self, step: int | None) -> "RunSettings":
        """Return the settings of the rollouts of a step; None: those that the schedules end with."""
        found = self
        if isinstance(self.max_calls, dict):
            found = replace(found, max_calls=scheduled(self.max_calls, step))
        if self.completion_tokens is not None:
            tokens = scheduled(self.completion_tokens, step)
            found = replace(found, sampling=replace(self.sampling, max_tokens=tokens))
        return found


class Run(Struct, frozen=True):
    """A training or evaluation run; tasks, rollouts, versions and keys belong to one run."""

    id: Id
    settings: RunSettings
    config: Any
    """The complete configuration, in the form a user writes it."""
    created: Seconds


class Task(Struct, frozen=True, forbid_unknown_fields=True):
    """One item of the user's data: the input of the agent."""

    id: Id
    input: Any


class Origin(Struct, frozen=True, forbid_unknown_fields=True):
    """Where an attempt begins: its first calls are answered as those of an earlier attempt were, from the record."""

    attempt: Id
    calls: AtLeastOne
    """How many of that attempt's calls, in recorded order; those that were not answered are sampled."""


class Group(Struct, frozen=True):
    """Rollouts of one task. They are normalised together and stay in one optimiser step."""

    id: Id
    run: Id
    task: Id
    purpose: Purpose
    size: Count
    priority: int
    created: Seconds
    finished: Seconds | None = None
    origin: Origin | None = None
    """What its rollouts replay; None: they begin with the task."""


class State(StrEnum):
    """State of a rollout."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"


class Rollout(Struct, frozen=True):
    """One requested execution of the agent. It may take several attempts and ends exactly once."""

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
    step: Count | None = None
    """The step of the training that requested it."""
    origin: Origin | None = None
    """What every attempt of it replays; None: it begins with the task."""


class DivergedCall(Struct, frozen=True):
    """The call at which an attempt asked something else than the record that it replayed; later ones are sampled."""

    number: AtLeastOne
    why: str


class Attempt(Struct, frozen=True):
    """One execution of a rollout by one worker, until it ends or its lease expires."""

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
    """Return value of the agent."""
    origin: Origin | None = None
    """What it replays: the origin of its rollout, or an earlier attempt of it that the infrastructure failed."""
    diverged: DivergedCall | None = None

    @property
    def trace_id(self) -> str:
        """W3C trace id of this attempt's spans."""
        return trace_id(self.id)


def trace_id(attempt: str) -> str:
    """Derive the trace id of an attempt from its id, so that neither side needs to look it up."""
    return blake2b(attempt.encode(), digest_size=16).hexdigest()


def rollout_of(attempt: str) -> str:
    """Derive the rollout of an attempt from its id."""
    return attempt.rpartition(".")[0]


class PromptOrigin(StrEnum):
    """How the prompt of a call was built."""

    FRESH = "fresh"
    CONTINUED = "continued"
    RERENDERED = "rerendered"


class CallStatus(StrEnum):
    """How a call ended: complete, cut off by its rollout's limit, abandoned by its client, or failed.

    The tokens of a `cut` call are what the model had sampled when the rollout ran out of time or of its token budget.
    They are trained on, because the model chose them. A client that disconnects for another reason leaves an
    `abandoned` call, which is not.
    """

    OK = "ok"
    CUT = "cut"
    ABANDONED = "abandoned"
    FAILED = "failed"


class VersionRun(Struct, frozen=True, array_like=True):
    """A run of consecutive tokens sampled by one version of the weights."""

    tokens: AtLeastOne
    number: Count


class WaitInterval(Struct, frozen=True, array_like=True):
    """A time in which a call waited for the model: in the gateway's queue, or while weights changed."""

    started: Seconds
    ended: Seconds


class Call(Struct, frozen=True, omit_defaults=True):
    """One model call, stored as the difference to its parent.

    Its prompt is the first `kept_ids` tokens of the parent's prompt and completion, followed by `prompt_ids`; messages
    work the same way. Further choices of one request have the first choice as parent and keep only its prompt.
    """

    id: Id
    parent: Id | None = None
    kept_ids: Count = 0
    kept_messages: Count = 0
    retry_of: Id | None = None
    choice: Count = 0
    policy: Name = DEFAULT_POLICY
    role: Name | None = None
    """Role named by the call or by a rule of the run. `Episode.role` also considers spans."""
    span: SpanId | None = None
    """Span in which the call was made."""
    prompt_origin: PromptOrigin = PromptOrigin.FRESH
    origin_reason: str = ""
    """Why the prompt was rendered again, or what of the earlier answers it keeps that the request left out."""
    status: CallStatus = CallStatus.OK
    finish: str = "stop"
    prompt_ids: tuple[Token, ...] = ()
    completion_ids: tuple[Token, ...] = ()
    logprobs: tuple[Real, ...] | None = None
    """Logprob of each completion token in the distribution it was sampled from; None if the engine gave none."""
    allowed: tuple[Share, ...] | None = None
    """For constrained calls: the probability mass of the tokens that the grammar allowed at each completion token.

    0 if the grammar allowed a single token, or if the engine gave no value."""
    versions: tuple[VersionRun, ...] = ()
    sampling: Sampling = Sampling()
    messages: tuple[Any, ...] = ()
    response: Any = None
    tools: tuple[Any, ...] | None = None
    """Tools offered in the request; None if they are the parent's."""
    request: Any = None
    """The other fields of the request, unchanged."""
    usage: Any = None
    """The tokens that an upstream counted for the request, as it reported them; with the first choice."""
    started: Seconds = 0.0
    ended: Seconds = 0.0
    context_tail: Count = 0
    """Tokens at the end that are context: the one that completes a stop string, if its text extends beyond it."""
    origin: Id | None = None
    """The attempt that sampled it, under the same id, if it was replayed from the record."""
    waits: tuple[WaitInterval, ...] = ()
    """When it waited for a slot, new weights or the engine's restart: no part of the rollout's time limit."""

    def __post_init__(self) -> None:
        if self.parent is None and (self.kept_ids or self.kept_messages):
            raise ValueError("`kept_ids` and `kept_messages` need a `parent`")
        if self.parent == self.id or self.retry_of == self.id:
            raise ValueError("`parent` and `retry_of` must name another call")
        if self.logprobs is not None:
            if len(self.logprobs) != len(self.completion_ids):
                raise ValueError(
                    f"`logprobs` has {len(self.logprobs)} entries for {len(self.completion_ids)} completion_ids"
                )
            if not all(map(math.isfinite, self.logprobs)):
                raise ValueError("`logprobs` must be finite numbers")
        if self.allowed is not None and len(self.allowed) != len(self.completion_ids):
            raise ValueError(f"`allowed` has {len(self.allowed)} entries for {len(self.completion_ids)} completion_ids")
        if self.context_tail > len(self.completion_ids):
            raise ValueError(f"`context_tail` is {self.context_tail} of {len(self.completion_ids)} completion_ids")
        if self.versions and sum(run.tokens for run in self.versions) != len(self.completion_ids):
            raise ValueError("`versions` must cover every completion id once")

    @property
    def chosen(self) -> Sequence[int]:
        """Indices of the completion tokens that the model chose for this answer; the others are context.

        A grammar forced them, or they say more than the answer, which a stop string ended.
        """
        tokens = range(len(self.completion_ids) - self.context_tail)
        if self.allowed is None:
            return tokens
        return [index for index in tokens if self.allowed[index] >= MIN_ALLOWED_MASS]

    @property
    def unusable(self) -> str | None:
        """Why this call cannot contribute a gradient; None if it can."""
        if self.status not in (CallStatus.OK, CallStatus.CUT):
            return str(self.status)
        if not self.completion_ids:
            return "no tokens"
        if self.logprobs is None:
            return "no logprobs"
        if not self.chosen:
            return "chosen by a grammar" if self.allowed is not None else "ended by a stop string within its only token"
        return None

    @property
    def untrainable(self) -> str | None:
        """Why this call is not trained on unless the run allows biased sampling; None if it is."""
        return self.unusable or self.sampling.biased


class RewardKind(StrEnum):
    """`final`: for the whole attempt. `step`: given by the agent during it. `automatic`: derived from signals."""

    FINAL = "final"
    STEP = "step"
    AUTOMATIC = "automatic"


FINAL_REWARD_ID, GROUP_REWARD_ID = "final", "group"
"""The ids of the final reward that a worker reports with the end of an attempt, and after a group was scored."""
GivenReward = Real | dict[Name, Real]
"""The final reward of an attempt as it is given: a number, or numbers by the names of its parts."""


def is_final_reward_id(id: str) -> bool:
    """Whether an id is reserved for final rewards and their parts."""
    return id.partition(".")[0] in (FINAL_REWARD_ID, GROUP_REWARD_ID)


class Reward(Struct, frozen=True, omit_defaults=True):
    """A reward of a call, of a span, or (if it names neither) of the whole attempt."""

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
    """Explanation of the reward; for automatic rewards, the evidence."""

    def __post_init__(self) -> None:
        for name in ("value", "weight"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"`{name}` must be a finite number")
        if self.call is not None and self.span is not None:
            raise ValueError("a reward belongs to a `call` or to a `span`, not to both")
        if self.kind is RewardKind.FINAL and (self.call or self.span):
            raise ValueError("a final reward belongs to the attempt: name neither `call` nor `span`")


class CallCredit(Struct, frozen=True, omit_defaults=True):
    """What a training step computed for one call, or why the call was left out of it."""

    attempt: Id
    call: Id
    value: Real | None = None
    """From the credit, before any comparison; None if the call was excluded before it."""
    advantage: Real | None = None
    weight: Real | None = None
    """Weight of each of its tokens in the loss, from the aggregation."""
    tokens: Count = 0
    """Number of its tokens that were trained on."""
    excluded: str = ""
    """Why it was not trained on; empty if it was."""


def final_rewards(id: str, given: GivenReward, source: str, weights: Mapping[str, float]) -> list[Reward]:
    """Return the records of a final reward: one, or one for each part, with its weight."""
    if not isinstance(given, dict):
        return [Reward(id, given, source=source)]
    return [
        Reward(f"{id}.{index}", value, name=name, weight=weights.get(name, 1.0), source=source)
        for index, (name, value) in enumerate(given.items())
    ]


class StepCredits(Struct, frozen=True):
    """The credits of calls in one step of one policy."""

    step: Count
    calls: tuple[CallCredit, ...]
    policy: Name = DEFAULT_POLICY


class Span(Struct, frozen=True, omit_defaults=True):
    """One OpenTelemetry span received over OTLP."""

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
        """Role (part of the agent) named by the span's attributes."""
        # OpenInference stores the metadata of LangChain and LangGraph as JSON.
        attributes = {**(decode_object(self.attributes.get("metadata")) or {}), **self.attributes}
        found = (attributes.get(name) for name in ROLE_ATTRIBUTES)
        return next((role for role in found if isinstance(role, str) and role), None)


ROLE_ATTRIBUTES = (
    "leyden.role",
    "gen_ai.agent.name",
    "agent.name",
    "graph.node.id",
    "langgraph.node",
    "lc_agent_name",
    "langgraph_node",
)
"""Span attributes that name a role, the most specific first."""


class Worker(Struct, frozen=True):
    """A process that leases rollouts."""

    id: Id
    seen: Seconds
    attempts: Count = 0
    """Number of attempts it has leased now."""


class Metric(Struct, frozen=True):
    """One metric of a policy at one step."""

    step: Count
    name: MetricName
    value: float
    at: Seconds = 0.0
    policy: Name = DEFAULT_POLICY

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
    """One entry of a run's append-only log. `seq` increases with every event."""

    seq: int
    run: str
    kind: EventKind
    subject: str
    at: Seconds
    data: dict[str, Any] = msgspec.field(default_factory=dict)
