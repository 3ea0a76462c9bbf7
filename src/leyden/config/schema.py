"""Every key of a configuration, with its default. The defaults are for a model worth training, on one machine."""

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from leyden import defaults
from leyden.records import Id, Name, Real

Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
AtLeastOne = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0, le=1e30)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]
Share = Annotated[float, Meta(ge=0, lt=1)]
UpToOne = Annotated[float, Meta(ge=0, le=1)]


class _Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class RolloutConfig(_Section, frozen=True):
    """How long and how far one execution of the agent may go."""

    time_limit_s: Positive = defaults.TIME_LIMIT_S
    memory_mb: AtLeastOne | None = None
    """Memory of each process of an agent that is a command."""
    cpu_s: Positive | None = None
    """CPU time of each process of an agent that is a command."""
    max_calls: AtLeastOne = 64
    """Model calls, so that a looping policy ends."""
    max_tokens: AtLeastOne | None = None
    """Sampled tokens."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = defaults.MAX_ATTEMPTS
    """Attempts where the machinery fails; an agent's own failure is its result."""
    failure_reward: Real = defaults.FAILURE_REWARD
    """What a rollout scores whose agent raises or runs out of time."""
    history: Literal["template", "exact"] = "template"
    """Whether earlier turns are shown as the model's template shows them, or with every token that was sampled."""
    lease_s: Annotated[float, Meta(ge=0.1, le=86_400)] = defaults.LEASE_S
    """How long a worker may be silent before its rollouts are given to another."""
    reward_time_limit_s: Positive = defaults.REWARD_TIME_LIMIT_S
    """How long one call of the reward function may take."""
    reward_tries: Annotated[int, Meta(ge=1, le=100)] = defaults.REWARD_TRIES
    """Calls of a reward function that fails, before the rollout ends without a reward."""
    agent_rewards: bool = False
    """Whether the agent's own key may set rewards over HTTP."""


class SamplingConfig(_Section, frozen=True):
    """How tokens are drawn in training rollouts, whatever the agent asks for."""

    temperature: Annotated[float, Meta(gt=0, le=100)] = 1.0
    max_tokens: AtLeastOne | None = None
    """Of one call; the agent's own limit holds too."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Only from the likeliest tokens with so much of the probability; like `top_k` and `min_p` no fair draw."""
    top_k: Whole = 0
    """Only from so many of the likeliest; 0: all."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Only from those with this share of the likeliest's probability."""


class Hyperparameters(_Section, frozen=True):
    """The numbers in the formulas of credits, advantages, losses, aggregations and corrections.

    They are keys of `[algorithm]`. Each algorithm's file declares which it reads.
    """

    gamma: UpToOne = 1.0
    """`discounted`, `gae`: the discount from one call to the next. All calls count as time, trained on or not."""
    lam: UpToOne = 0.95
    """`gae`: the weight of rewards against the critic; 1 uses rewards alone, 0 the next state's value."""
    spread: Literal["all", "last", "even"] = "all"
    """`stepwise`: the final reward goes whole to every selected call, to the last, or to each an equal part."""
    step_weight: NotNegative = 1.0
    """`gigpo`: the weight of the step level beside the episode level."""
    clip_low: Share = 0.2
    """Losses: ratios are clipped below 1 - clip_low."""
    clip_high: Annotated[float, Meta(ge=0)] = 0.28
    """Losses: ratios are clipped above 1 + clip_high."""
    clip_dual: Annotated[float, Meta(gt=1)] | None = None
    """`ppo_clip`, `gspo`: the largest ratio, more than 1, at which a token with a negative advantage still has a
    gradient; None: no limit."""
    length: AtLeastOne | None = None
    """`constant`: the tokens that every rollout is divided by."""
    correction_low: NotNegative = 0.5
    """`masked`: tokens with a smaller ratio of the proximal policy to the sampler are not trained on."""
    correction_high: Positive = 2.0
    """`masked`: tokens with a larger ratio are not trained on; `truncated`: larger ratios count as this."""


class AlgorithmConfig(Hyperparameters, frozen=True):
    """From rewards to a loss: an algorithm for each part, and its hyperparameters."""

    credit: str = "identical"
    """How an episode's rewards become a value for each call."""
    advantage: str = "grpo"
    """How a group's values become advantages."""
    level: Literal["rollout", "transition"] = "rollout"
    """Whether each rollout or each call counts once in a group's mean and deviation."""
    state: str = "messages"
    """How `gigpo` recognises that two calls were in the same state."""
    normalize_by: str | None = None
    """A key of the tasks, such as their source: global normalisation is done within each of its values."""
    loss: str = "ppo_clip"
    aggregation: str = "rollout_mean"
    """How the losses of tokens become one number."""
    correction: str = "truncated"
    """How tokens are weighted whose probability differs between sampler and trainer; `none`: not at all."""
    correction_level: Literal["token", "call", "rollout"] = "token"
    kl: NotNegative = 0.0
    """The weight of the KL divergence from the model that training began with."""
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimate: Literal["k1", "k2", "k3"] | None = None
    """Default: `k3` in the loss, `k1` in the reward."""
    entropy: NotNegative = 0.0
    """The weight of an entropy bonus."""

    def __post_init__(self) -> None:
        if self.kl_estimate is None:
            force_setattr(self, "kl_estimate", "k1" if self.kl_in == "reward" else "k3")


class SignalsConfig(_Section, frozen=True):
    """What a call earns for what the record shows by itself: a weight for each signal, 0 for none."""

    tool_failed: Real = 0.0
    """A tool that it called ended with an error."""
    tool_succeeded: Real = 0.0
    """A tool that it called ended without one."""
    malformed_call: Real = 0.0
    """It tried a tool call that cannot be read."""
    unknown_tool: Real = 0.0
    """It called a tool that it was not offered."""
    bad_arguments: Real = 0.0
    """The arguments of its tool call break the tool's JSON schema."""
    repeated_call: Real = 0.0
    """It made the same tool call again, and nothing had changed."""
    cut: Real = 0.0
    """The length limit ended its answer."""
    empty_answer: Real = 0.0
    """Its answer has neither text nor a tool call."""
    rule: str | None = None
    """Like `reward`: a function of a signal whose number takes the place of the weight; None leaves the weight."""
    anneal_steps: AtLeastOne | None = None
    """Over so many steps the weights fall to 0; none: they stay."""
    exempt: tuple[str, ...] = ()
    """Tools that may be called again and again, to wait for something."""


class AdapterConfig(_Section, frozen=True):
    """LoRA: small matrices that are trained in place of the weights."""

    rank: AtLeastOne = 16
    alpha: AtLeastOne = 32
    modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The linear layers that get one, by the last part of their names."""


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
    """How the learning rate falls from one step to the next, after the warm-up."""
    warmup_steps: Whole = 0
    """Over which the learning rate rises."""
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
    allow_biased_sampling: bool = False
    """Whether to train on calls that were sampled greedily, with truncation or with penalties."""
    critic_learning_rate: Positive = 1e-3
    """Of the critic, where the algorithm has one."""
    lora: AdapterConfig | None = None
    """None: every weight is trained."""
    gradient_checkpointing: bool = False
    """Less memory for a third more work."""


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

    kind: Literal["auto", "torch", "vllm"] = "auto"
    """`torch`: embedded in the training process; `vllm`: a vLLM server that Leyden starts and supervises.
    `auto`: vLLM where there is a CUDA device and vLLM is installed, else the embedded engine."""
    slots: AtLeastOne | None = None
    """Requests that are computed at once; where unset: 64 on a CPU, 256 on a GPU, 1024 with vLLM."""
    memory: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """The share of the GPU's memory that vLLM takes; where unset, what training leaves, up to 0.6."""
    vllm_python: str | None = None
    """The Python interpreter that has vLLM, where it is not the one that runs Leyden."""
    vllm_arguments: tuple[str, ...] = ()
    """More arguments of vLLM's server."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The precision in which engine and trainer compute; master weights and optimiser state are float32 in any case.
    `auto`: bfloat16 on a GPU, float32 on a CPU."""


class WorkerConfig(_Section, frozen=True):
    """What runs agents on this machine."""

    processes: Whole = defaults.WORKER_PROCESSES
    """Processes that run agents; 0: none here, `leyden worker` runs them elsewhere."""
    concurrency: AtLeastOne = defaults.CONCURRENCY
    """Rollouts at once, over all processes."""
    drain_s: NotNegative = defaults.DRAIN_S
    """Where an agent hangs in a host, how long the others in it may go on before it is ended."""


RESERVED = ("task", "attempt", "result", "episode", "group")
"""What agents and reward functions are given by these names is no service."""


class ServiceConfig(_Section, frozen=True):
    """Something costly that a worker starts once and lends to one rollout at a time: a class, or a command."""

    make: str | None = None
    """`module:name` or `file.py:name`: a class or a function without arguments, called in the process that uses it."""
    command: str | None = None
    """A program that serves; `{port}` in it is a free port."""
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """How many each worker has."""
    address: str = "http://127.0.0.1:{port}"
    """What is lent of a command."""
    ready: str | None = None
    """When a command is ready: a URL that answers, or a text that it prints; None: when its port answers."""
    start_limit_s: Positive = 60.0
    """How long a command may take to be ready."""
    agent: bool = True
    """Whether an agent that is a command or an endpoint is lent one; one in Python asks for it by name."""

    def __post_init__(self) -> None:
        if (self.make is None) == (self.command is None):
            raise ValueError("a service has either `make` or `command`")
        if self.command is not None and self.ready is None and "{port}" not in self.command:
            raise ValueError("`command` has no {port}: write where it takes one, or say by `ready` when it is ready")


UPSTREAM_KEY_VARIABLE = "LEYDEN_UPSTREAM_KEY"
"""Where the key of the upstream is found, and no agent finds it."""


class UpstreamConfig(_Section, frozen=True):
    """An OpenAI-compatible service for model names that the routes send there; its key is in LEYDEN_UPSTREAM_KEY."""

    url: str | None = None
    timeout_s: Positive = defaults.UPSTREAM_TIMEOUT_S
    """How long it may be silent."""


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
    signals: SignalsConfig = field(default_factory=SignalsConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    workers: WorkerConfig = field(default_factory=WorkerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    services: dict[str, ServiceConfig] = {}
    """By name: what a worker starts once and lends to one rollout at a time."""
    routes: dict[str, Name] = {}
    """Which model names are served by `policy`, and which by `upstream`; none: every name is the policy."""
    roles: dict[Name, str] = {}
    """By role, a regular expression that the system prompt of its calls matches; for agents that cannot say it."""
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)

    def __post_init__(self) -> None:
        for name in self.services:
            if not name.isidentifier() or name in RESERVED:
                raise ValueError(f"`services.{name}` cannot be asked for by a parameter: give it another name")
        for model, server in self.routes.items():
            if server not in ("policy", "upstream"):
                raise ValueError(f"`routes`: {model!r} is served by {server!r}: write policy or upstream")
            if server == "upstream" and self.upstream.url is None:
                raise ValueError(f"`routes`: {model!r} is served upstream, and `upstream.url` says not where")
        for role, rule in self.roles.items():
            try:
                re.compile(rule)
            except re.error as error:
                raise ValueError(f"`roles.{role}` is no regular expression: {error}") from error
        algorithm, training, sampling = self.algorithm, self.training, self.sampling
        if (sampling.top_p < 1 or sampling.top_k or sampling.min_p) and not training.allow_biased_sampling:
            raise ValueError(
                "`sampling` truncates the distribution, and such calls are not trained on: "
                "remove `top_p`, `top_k` and `min_p`, or set `training.allow_biased_sampling = true`"
            )
        if algorithm.correction_low > algorithm.correction_high:
            raise ValueError(
                f"`algorithm.correction_low` is {algorithm.correction_low}, "
                f"more than `algorithm.correction_high` ({algorithm.correction_high}): nothing lies between them"
            )
        if training.min_group > training.group_size:
            raise ValueError(
                f"`training.min_group` is {training.min_group}, more than `training.group_size` "
                f"({training.group_size}): set `training.min_group = {training.group_size}` at the most"
            )
        if training.updates_per_step > training.tasks_per_step:
            raise ValueError("`training.updates_per_step` is more than `training.tasks_per_step`: a group stays whole")
