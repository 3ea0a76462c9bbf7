"""Read models of the dashboard, `leyden top` and `leyden report`: summaries and pages of lists."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from leyden.api.wire import ListedRollout
from leyden.estimates import PairedDifference
from leyden.records import Attempt, CallCredit, Count, Name, Purpose, Reward, Span, Task

_Text = Annotated[str, Meta(max_length=2000)]
Names = Annotated[str, Meta(max_length=4000, description="names of metrics, separated by commas; NAME* is a prefix")]
Integer = Annotated[int, Meta(ge=0, le=2**62)]


class Series(Struct, frozen=True, omit_defaults=True):
    """One metric by step. If steps are joined, a value is the mean of several, between `low` and `high`."""

    steps: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


class StepRange(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The steps to read; by default all."""

    step_from: Count | None = None
    step_to: Count | None = None

    def has(self, step: int) -> bool:
        """Whether a step is in the range."""
        return (self.step_from or 0) <= step <= (step if self.step_to is None else self.step_to)


class PointsQuery(StepRange, frozen=True, forbid_unknown_fields=True):
    """At most how many points of each curve to read."""

    points: Annotated[int, Meta(ge=1, le=100_000)] = 300


class SeriesQuery(PointsQuery, frozen=True, forbid_unknown_fields=True):
    """Which metrics to read, and at most how many points of each."""

    names: Names = ""
    """Empty: all."""
    policy: Annotated[str, Meta(max_length=160)] = ""
    """The policy whose metrics these are; empty: the first that the run trains."""


class RunCard(Struct, frozen=True):
    """A run in the list of runs."""

    id: str
    created: float
    last_event: float
    """When something last happened in it."""
    state: Literal["running", "finished", "unchanged", "idle"]
    """`unchanged`: a training that ended without an update of the weights."""
    model: str | None
    step: int
    steps: int | None
    """The last step that its configuration asks for."""
    rollouts: dict[str, int]
    """Counts by state; finished rollouts by ending."""
    calls: Integer
    tokens: Integer
    held_out: bool
    """Whether the rewards below are those of held-out tasks, not of training."""
    reward: float | None
    error: float | None
    counted: int
    """Rollouts that `reward` is the mean of."""
    measured: Literal["held-out", "training", "dev"]
    """Which rollouts these are."""
    best: float | None
    """The largest mean of a step of which no rollout is queued or running."""
    best_error: float | None
    best_step: int | None
    curve: Series
    """The reward by step, in a few points."""
    policies: dict[str, int] = {}
    """The policies that it trains, each with the newest version of its weights."""

    @property
    def progress(self) -> str:
        """The step of how many."""
        return f"{self.step}/{self.steps}" if self.steps else str(self.step)


class CheckpointView(Struct, frozen=True):
    """A checkpoint of a policy."""

    policy: str
    step: int
    saved: float
    bytes: int
    best: bool
    """Whether it has the highest held-out reward."""
    path: str


class RunFiles(Struct, frozen=True):
    """What the folder of a run has besides its store."""

    folder: str
    checkpoints: tuple[CheckpointView, ...]
    logs: dict[str, str]
    """The ends of its logs, by the names of the files."""


class StepRewards(Struct, frozen=True):
    """Rewards of the rollouts of one step, computed from the rollouts themselves."""

    step: int
    count: int
    mean: float
    deviation: float
    error: float | None = None
    """The standard error of the mean, clustered by task. Of training only at the last and at the best step."""


class RunRewards(Struct, frozen=True):
    """Rewards by step, of training and of held-out tasks."""

    train: tuple[StepRewards, ...]
    held_out: tuple[StepRewards, ...]


class EvaluationQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Which evaluation of a run to read; by default the last one."""

    step: Count | None = None


class Evaluation(Struct, frozen=True):
    """One evaluation of a run on its held-out tasks."""

    run: str
    step: int | None
    """None for a run of `leyden eval`, which has no steps."""
    rewards: dict[str, tuple[float, ...]]
    """By task, of the rollouts that count."""

    @property
    def name(self) -> str:
        """The run, and the step if it has one."""
        return self.run if self.step is None else f"{self.run} at step {self.step}"


class ComparisonQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """The run to compare with."""

    other: Name


class Comparison(Struct, frozen=True):
    """Two evaluations, and the second minus the first."""

    first: str
    second: str
    result: PairedDifference


RolloutOrder = Literal[
    "newest",
    "oldest",
    "reward",
    "-reward",
    "step",
    "-step",
    "tokens",
    "-tokens",
    "calls",
    "-calls",
    "outcome",
    "-outcome",
]


class RolloutQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Filters, order and page of a list of rollouts."""

    purpose: Purpose | None = None
    ending: Annotated[str, Meta(max_length=200)] = ""
    """Endings or states, separated by commas."""
    step_from: Count | None = None
    step_to: Count | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    reward_below: float | None = None
    tokens_from: Integer | None = None
    tokens_to: Integer | None = None
    role: _Text = ""
    message: _Text = ""
    """A group of failures, as `Failure.message` gives it."""
    text: _Text = ""
    """Text of the task or of the result, in either case."""
    task: Annotated[str, Meta(max_length=160)] = ""
    sort: RolloutOrder = "newest"
    offset: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=500)] = 50


class RolloutListing(Struct, frozen=True):
    """One page of a filtered list, and how many rollouts match."""

    rollouts: tuple[ListedRollout, ...]
    total: int
    questions: dict[str, str] = {}
    """The beginnings of their tasks' input, by task."""
    answers: dict[str, str] = {}
    """The beginnings of the results of their last attempts, by rollout."""


class TaskQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Order and page of the list of tasks."""

    purpose: Purpose | None = None
    sort: Literal["success", "-success", "reward", "-reward", "flat", "-flat", "groups", "-groups", "step", "-step"] = (
        "success"
    )
    offset: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=500)] = 50


class ListedTask(Struct, frozen=True):
    """What the rollouts of a task earned; None if no reward says."""

    id: str
    purpose: str
    groups: int
    rollouts: int
    success: float | None
    """The share of rewards that are at least `evaluation.success`."""
    reward: float | None
    """The mean reward."""
    flat: float | None
    """The share of groups of two rewards or more whose rewards are all equal."""
    step: int | None
    """The last step that requested a group."""
    input: str
    """The beginning of the task's input, as JSON."""


class TaskListing(Struct, frozen=True):
    """One page of the list of tasks, and how many there are."""

    tasks: tuple[ListedTask, ...]
    total: int


class Facets(Struct, frozen=True):
    """The values that a list of rollouts can be filtered by."""

    endings: dict[str, int]
    purposes: dict[str, int]
    roles: tuple[str, ...]
    last_step: int | None


class Failure(Struct, frozen=True):
    """Failures whose messages differ only in numbers and ids."""

    ending: str
    message: str
    """With numbers and ids replaced by #."""
    count: int
    example: str
    """The newest rollout among them."""


class Failures(Struct, frozen=True):
    """Failed rollouts by message, the most frequent first."""

    groups: tuple[Failure, ...]
    examined: int
    """How many failures were read: the newest ones."""
    total: int


class TokenView(Struct, frozen=True, array_like=True):
    """A sampled token: its text, its logprob, and the version of the weights that sampled it."""

    text: str
    logprob: float | None
    version: int | None
    untrained: str
    """Why it was not trained on although its call was, or would not be; empty if it was, or may be."""


class CallView(Struct, frozen=True):
    """A model call of a rollout, as the model saw it and as training used it."""

    id: str
    parent: str | None
    role: str | None
    policy: str
    status: str
    prompt_origin: str
    origin_reason: str
    finish: str
    span: str | None
    started: float
    ended: float
    prompt_tokens: int
    new_prompt_tokens: int
    messages: tuple[Any, ...]
    """The messages that it adds to its parent's conversation."""
    kept_messages: int
    prompt: str | None
    """The text of the prompt's new tokens; None if the server has no tokenizer."""
    response: Any
    tokens: tuple[TokenView, ...]
    untrainable: str | None
    credit: CallCredit | None


class SignalView(Struct, frozen=True):
    """A signal that the record of a call shows."""

    call: str
    kind: str
    why: str
    tool: str | None


class AttemptQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """Which attempt of a rollout to show."""

    attempt: Count | None = None
    """None: the last one."""


class RolloutView(Struct, frozen=True):
    """One attempt of a rollout with all that its page shows."""

    rollout: ListedRollout
    task: Task
    attempt: Attempt
    attempts: tuple[Attempt, ...]
    calls: tuple[CallView, ...]
    spans: tuple[Span, ...]
    rewards: tuple[Reward, ...]
    """Those in effect."""
    signals: tuple[SignalView, ...]
    siblings: tuple[ListedRollout, ...]
    """The rollouts of its group, itself included."""
    output: str
    versions: dict[str, int]
    """By policy, the newest version of its weights when the attempt ended."""
    trained: int | None
    """The step that trained on it."""
    several: bool
    """Whether the run has several policies."""


class TreeNode(Struct, frozen=True):
    """A run of tokens that some calls of a group share."""

    parent: int
    """Index of the parent node; -1 at the root."""
    tokens: int
    sampled: bool
    calls: int
    """Calls whose sequence goes through this node."""
    rollouts: tuple[int, ...]
    """Indices of those rollouts within the group."""
    text: str
    """Its beginning."""


class PrefixTree(Struct, frozen=True):
    """The prefix tree of a group's calls; a node follows its parent."""

    nodes: tuple[TreeNode, ...]
    tokens: int
    """Tokens of all sequences."""
    distinct: int
    """Tokens of the tree."""
