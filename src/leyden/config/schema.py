"""Every key of a configuration, with its default. The defaults are for a model worth training, on one machine."""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from leyden.records import Id, Real

Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e30)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class _Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class RolloutConfig(_Section, frozen=True):
    """How long and how far one execution of the agent may go."""

    time_limit_s: Positive = 600.0
    memory_mb: AtLeastOne | None = None
    """Memory of each process of an agent that is a command."""
    cpu_s: Positive | None = None
    """CPU time of each process of an agent that is a command."""
    max_calls: AtLeastOne = 64
    """Model calls, so that a looping policy ends."""
    max_tokens: AtLeastOne | None = None
    """Sampled tokens."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    """Attempts where the machinery fails; an agent's own failure is its result."""
    failure_reward: Real = 0.0
    """What a rollout scores whose agent raises or runs out of time."""
    history: Literal["template", "exact"] = "template"
    """Whether earlier turns are shown as the model's template shows them, or with every token that was sampled."""
    lease_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 60.0
    """How long a worker may be silent before its rollouts are given to another."""


class SamplingConfig(_Section, frozen=True):
    """How tokens are drawn in training rollouts, whatever the agent asks for."""

    temperature: Annotated[float, Meta(gt=0, le=100)] = 1.0
    max_tokens: AtLeastOne | None = None
    """Of one call; the agent's own limit holds too."""


class AlgorithmConfig(_Section, frozen=True):
    """From rewards to a loss."""

    credit: str = "identical"
    """How an episode's rewards become a value for each call."""
    advantage: str = "grpo"
    """How a group's values become advantages."""
    level: Literal["rollout", "transition"] = "rollout"
    """Whether each rollout or each call counts once in a group's mean and deviation."""
    loss: str = "ppo_clip"
    clip_low: Share = 0.2
    clip_high: Annotated[float, Meta(ge=0)] = 0.28
    aggregation: str = "rollout_mean"
    """How the losses of tokens become one number."""


class TrainingConfig(_Section, frozen=True):
    """The optimiser's steps."""

    steps: Whole = 200
    tasks_per_step: AtLeastOne = 16
    group_size: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Rollouts of one task."""
    min_group: AtLeastOne = 2
    """A group with fewer rollouts that count is dropped, and another task takes its place."""
    learning_rate: Positive = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Whole = 0
    weight_decay: NotNegative = 0.0
    betas: tuple[Share, Share] = (0.9, 0.99)
    clip_norm: Positive = 1.0
    """The largest norm of a gradient."""
    updates_per_step: AtLeastOne = 1
    """Into how many optimiser updates the groups of a step are divided."""
    batch_tokens: Annotated[int, Meta(ge=64)] = 16_384
    """Tokens that are computed at once: less takes less memory and gives the same gradient."""
    layout: Literal["tree", "rows"] = "tree"
    """Whether tokens that calls share are computed once, or every call by itself; the gradient is the same."""
    roles: tuple[str, ...] = ()
    """Only the calls in these roles are trained on; none named: all."""


class EvaluationConfig(_Section, frozen=True):
    """Measuring on tasks that are not trained on."""

    every: Whole = 10
    """Steps between evaluations; 0: only at the start and at the end."""
    rollouts: AtLeastOne = 1
    """Rollouts of each held-out task."""


class CheckpointConfig(_Section, frozen=True):
    """What is kept of a run's weights. The best by held-out reward is always kept."""

    every: AtLeastOne = 10
    keep: AtLeastOne = 2


class EngineConfig(_Section, frozen=True):
    """What samples."""

    slots: AtLeastOne = 64
    """Requests that are computed at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights, which engine and trainer share: bfloat16 loses updates as small as RL's."""


class WorkerConfig(_Section, frozen=True):
    """What runs agents on this machine."""

    hosts: Whole = 1
    """Processes with agents in them; 0: none here, `leyden worker` runs them elsewhere."""
    concurrency: AtLeastOne = 64
    """Rollouts at once, over all hosts."""


class ServerConfig(_Section, frozen=True):
    """Where the server listens."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0: a free one."""
    advertise: str | None = None
    """What workers elsewhere reach it by."""


Sink = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Config(_Section, frozen=True):
    """A run."""

    run: Id
    """Its name; that of the file where none is given."""
    agent: str
    """`module:name` or `file.py:name` (a function or a class), a command, or the URL of an HTTP endpoint."""
    tasks: str
    """A file with one JSON object a line."""
    reward: str | None = None
    """Like `agent`: a function of `task`, `result` and `episode`, as it names them. None: what the agent returns."""
    held_out: str | Whole | Share = 0.1
    """The tasks to measure on: a file, how many of the tasks, or which share of them."""
    model: str = "spark"
    """`spark`, a folder, or a name that Hugging Face knows."""
    seed: Whole = 0
    base: str = "."
    """The folder in which files and modules are looked for; that of the file where none is given."""
    home: str = "runs"
    """The folder of all runs; this one's is beneath it."""
    deterministic: bool = False
    """One request at a time, so that the same run gives the same weights. Slow."""
    report: tuple[Sink, ...] = ()
    """Where metrics go beside the run's folder."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    workers: WorkerConfig = field(default_factory=WorkerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        training = self.training
        if training.min_group > training.group_size:
            raise ValueError(
                f"`training.min_group` is {training.min_group}, more than `training.group_size` ({training.group_size})"
            )
        if training.updates_per_step > training.tasks_per_step:
            raise ValueError("`training.updates_per_step` is more than `training.tasks_per_step`: a group stays whole")
