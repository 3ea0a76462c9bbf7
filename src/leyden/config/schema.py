"""Every key of a configuration, with its default. The defaults are for a model worth training, on one machine."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta, Struct, field
from msgspec.structs import force_setattr

from leyden import defaults
from leyden.patterns import PatternError, check_rule
from leyden.records import DEFAULT_POLICY, AtLeastOne, Count, FixedAnswer, Id, Name, Real, Schedule, Share

Positive = Annotated[float, Meta(gt=0, le=1e30)]
NotNegative = Annotated[float, Meta(ge=0, le=1e30)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
PolicyName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$(?!\n)",
        max_length=80,
        description="letters, digits, _ and -, beginning with a letter or digit, 80 at the most",
    ),
]
_RESERVED_POLICIES = ("upstream", "fixed")
"""Under which the gateway records calls that no policy answered."""


class _Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class RolloutConfig(_Section, frozen=True):
    """Limits of one rollout, and how its failures are handled."""

    time_limit_s: Positive = 600.0
    """Seconds that an attempt may take."""
    memory_mb: AtLeastOne | None = None
    """The memory limit, in MB, of a command or a host with all its rollouts, with all processes that it starts;
    None: no limit.

    In a sandbox, None is half of the memory of the machine.
    """
    cpu_s: Positive | None = None
    """The limit of CPU seconds of each process of an agent that is a command; None: no limit."""
    max_calls: AtLeastOne | Schedule = 64
    """The most model calls of a rollout, so that a policy that loops ends. `{1 = 4, 20 = 8}`: 4 from step 1 on and 8
    from step 20 on; evaluations have the last value."""
    max_tokens: AtLeastOne | None = None
    """The most sampled tokens of a rollout; None: no limit."""
    max_attempts: Annotated[int, Meta(ge=1, le=100)] = defaults.MAX_ATTEMPTS
    """The most attempts if the infrastructure fails; a failure of the agent itself is not retried."""
    replay: bool = True
    """Whether a retry gets the answers that were sampled before the failure from the record, so that nothing is
    sampled twice. The agent's tools run again: switch it off if they must not be given the same arguments again."""
    fixed_seeds: bool = False
    """Whether every attempt of a task begins with the same seeds of `random` and numpy and the same hashes of texts,
    so that an agent that depends on them replays exactly. Processes of Python agents then run one rollout at a time."""
    failure_reward: Real = defaults.FAILURE_REWARD
    """The reward of a rollout whose agent raises or exceeds its time limit."""
    history: Literal["template", "exact"] = "template"
    """Earlier turns in a prompt: `template` renders them as the chat template does (some drop reasoning), `exact` keeps
    every sampled token."""
    reasoning: bool | None = None
    """Whether the model reasons before it answers, if its template can switch that; None: as the agent requests, or as
    the template says."""
    tool_calls: Literal["marked", "any"] = "marked"
    """What is a tool call: `marked` takes what stands in the marks of the model's template, `any` also JSON at the end
    of an answer that names an offered tool, as models write it that were trained little on tools."""
    lease_s: Annotated[float, Meta(ge=0.1, le=86_400)] = defaults.LEASE_S
    """Seconds without a heartbeat after which a worker's rollouts are leased to another."""
    reward_time_limit_s: Positive = 600.0
    """Seconds that one call of the reward function may take."""
    reward_tries: Annotated[int, Meta(ge=1, le=100)] = 3
    """How often a failing reward function is called before the rollout ends without a reward."""
    reward_weights: dict[Name, Real] = {}
    """Weights of the parts of a reward that has several, by name; others have 1."""
    agent_rewards: bool = False
    """Whether agents may set rewards over HTTP with their own keys."""


class SamplingConfig(_Section, frozen=True):
    """How tokens are sampled in training rollouts. Replaces the settings of the agent's requests."""

    temperature: Annotated[float, Meta(gt=0, le=100)] = 1.0
    max_tokens: AtLeastOne | Schedule | None = None
    """The most tokens of one completion, or these by step, as in `rollout.max_calls`; None: the limit of the agent's
    request. The smaller one applies."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Sample only from the most likely tokens that have this total probability. Like `top_k` and `min_p` this biases
    training; see `training.allow_biased_sampling`."""
    top_k: Count = 0
    """Sample only from this many of the most likely tokens; 0: all."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Sample only tokens with at least this fraction of the most likely token's probability; 0: all."""


class Hyperparameters(_Section, frozen=True):
    """The numbers in the formulas of credits, advantages, losses, aggregations and corrections.

    They are keys of `[algorithm]`. Each algorithm's file declares which it reads.
    """

    gamma: Share = 1.0
    """`discounted`, `gae`: the discount from one call to the next. All calls count as time, trained on or not."""
    lam: Share = 0.95
    """`gae`: the weight of rewards against the critic; 1 uses rewards alone, 0 the next state's value."""
    spread: Literal["all", "last", "even"] = "all"
    """`stepwise`: the final reward goes whole to every selected call, to the last, or to each an equal part."""
    deviation_floor: NotNegative = 0.125
    """Advantages that divide by a standard deviation: the smallest divisor, in units of reward. The deviation of
    rewards of 0 and 1 is at least 1 / sqrt(n) in a group of n, so the default changes nothing for groups up to 64."""
    step_weight: NotNegative = 1.0
    """`gigpo`: the weight of the step level beside the episode level."""
    branch_points: AtLeastOne = 1
    """`sampled`: the most points of a rollout from which it is continued."""
    clip_low: BelowOne = 0.2
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
    compare: Literal["auto", "group", "role", "turn"] = "auto"
    """Which calls of a group a call is compared with: all, those of its role, or those of its role and turn. `auto`:
    by turn if the credit gives the calls of a rollout different values, else with all."""
    scale_steps: bool = False
    """Multiply step and automatic rewards by the standard deviation of the final rewards of their group, so that they
    have the same weight beside easy and hard tasks, and none if all final rewards are equal."""
    state: str = "messages"
    """How `gigpo` recognises that two calls were in the same state."""
    branch: str = "even"
    """From which points of a rollout `sampled` continues it."""
    continuations: Annotated[int, Meta(ge=2, le=10_000)] = 4
    """`sampled`: the rollouts that are sampled from each point of a rollout."""
    branch_tokens: Positive = 0.5
    """`sampled`: the tokens that a step samples for continuations, in multiples of those of its other rollouts."""
    normalize_by: str | None = None
    """A key of the tasks, such as their source: global normalisation is done within each of its values."""
    loss: str = "ppo_clip"
    aggregation: str = "rollout_mean"
    """How the losses of tokens become one number."""
    correction: str = "truncated"
    """How tokens are weighted whose probability differs between sampler and trainer; `none`: not at all."""
    correction_level: Literal["token", "call", "rollout"] | None = None
    """Default: `call` for `gspo`, whose ratio is that of a call, else `token`."""
    correction_ratio: Literal["product", "geometric"] | None = None
    """The ratio of a call or a rollout: the product of those of its tokens, or their geometric mean, which is the
    default for `gspo`."""
    kl: NotNegative = 0.0
    """The weight of the KL divergence from the model that training began with."""
    kl_in: Literal["loss", "reward"] = "loss"
    kl_estimate: Literal["k1", "k2", "k3"] | None = None
    """Default: `k3` in the loss, `k1` in the reward."""
    entropy: NotNegative = 0.0
    """The weight of an entropy bonus."""
    value_clip: Positive | None = None
    """How far a critic's value may move from that at the start of the step before its loss stops falling; None: no
    limit. For several updates per step."""

    def __post_init__(self) -> None:
        of_calls = self.loss == "gspo"
        for key, default in (
            ("kl_estimate", "k1" if self.kl_in == "reward" else "k3"),
            ("correction_level", "call" if of_calls else "token"),
            ("correction_ratio", "geometric" if of_calls else "product"),
        ):
            if getattr(self, key) is None:
                force_setattr(self, key, default)


class SignalsConfig(_Section, frozen=True):
    """Automatic rewards: the weight of each signal that is found in the record; 0 switches it off."""

    tool_failed: Real = 0.0
    """The call used a tool that failed."""
    tool_succeeded: Real = 0.0
    """The call used a tool that did not fail."""
    malformed_call: Real = 0.0
    """The call wrote a tool call that cannot be parsed."""
    unknown_tool: Real = 0.0
    """The call used a tool that it was not offered."""
    bad_arguments: Real = 0.0
    """The arguments of a tool call violate the tool's JSON schema."""
    repeated_call: Real = 0.0
    """The call repeated an earlier tool call with the same arguments, and nothing had changed."""
    cut: Real = 0.0
    """The completion ended at its length limit."""
    empty_answer: Real = 0.0
    """The completion has neither text nor a tool call."""
    rule: str | None = None
    """A function, written as for `reward`, that takes a signal and returns its reward, or None for the weight."""
    anneal_steps: AtLeastOne | None = None
    """The number of steps over which the weights fall to 0; None: they stay."""
    exempt: tuple[str, ...] = ()
    """Tools that may be called repeatedly, to poll for something, without `repeated_call`."""


class AdapterConfig(_Section, frozen=True):
    """LoRA: trains low-rank adapters instead of all weights."""

    rank: AtLeastOne = 16
    alpha: AtLeastOne = 32
    modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The linear layers with an adapter, by the last part of their names."""


class TrainingConfig(_Section, frozen=True):
    """Steps, batches and the optimiser."""

    steps: Count = 200
    """Training steps of the run."""
    time_limit_s: Positive | None = None
    """Seconds after which the current step becomes the last one, with a measurement and a checkpoint."""
    tasks_per_step: AtLeastOne = 16
    """Tasks of a step; each makes one group of rollouts."""
    group_size: Annotated[int, Meta(ge=1, le=10_000)] = 8
    """Rollouts per task."""
    task_order: Literal["shuffled", "by_difficulty"] = "shuffled"
    """`shuffled`: every task once, in a random order, then again in another; `by_difficulty`: tasks are drawn by the
    chance that their rewards differ, as their recent rollouts let expect."""
    alternate: Count = 0
    """If `policies` trains several: the steps of one policy before it is the next one's turn; 0: all in each step."""
    hard_tasks: Literal["keep", "continue"] = "keep"
    """Tasks of which at most a quarter of the rollouts succeed: `keep` leaves them to their order, `continue` requests
    another group that begins inside the task's best rollout, whose first calls are replayed from the record."""
    max_staleness: Count = 0
    """How many publications may come between sampling a token and training on it. 0: agents wait while weights are
    trained; 1 or more: they go on, and the correction accounts for the difference."""
    early_gradient: bool = False
    """Compute the gradient of groups that have finished while others run; for steps of one update."""
    flat_groups: Literal["keep", "refill"] = "keep"
    """Groups whose rollouts leave nothing to compare: `keep` counts them among the tasks of a step, `refill` replaces
    them by groups of other tasks."""
    max_refill: NotNegative = 2.0
    """The most groups that a step replaces because they were dropped or flat, in multiples of `tasks_per_step`."""
    min_group: AtLeastOne = 2
    """A group with fewer usable rollouts is dropped and replaced by another task."""
    learning_rate: Positive | None = None
    """The learning rate after the warm-up. If unset: by the number of the model's parameters, and with `lora` ten times
    as much; a run that is resumed keeps the one that it began with."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning-rate schedule after the warm-up; `linear` and `cosine` would be 0 in the step after the last."""
    warmup_steps: Count = 0
    """Steps over which the learning rate rises to its full value."""
    weight_decay: NotNegative = 0.0
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    clip_norm: Positive = 1.0
    """The largest norm of the gradient; larger gradients are scaled down."""
    updates_per_step: AtLeastOne = 1
    """Optimiser updates per step, among which its groups are divided."""
    epochs: AtLeastOne = 1
    """Passes over the samples of a step, each with `updates_per_step` updates."""
    batch_tokens: Annotated[int, Meta(ge=64)] = 8_192
    """Tokens of a micro-batch: fewer take less memory and give the same gradient."""
    layout: Literal["tree", "rows"] = "tree"
    """`tree` computes tokens that calls share once, `rows` computes every call by itself; the gradient is the same."""
    roles: tuple[str, ...] = ()
    """Train only on calls with these roles; empty: on all."""
    allow_biased_sampling: bool = False
    """Train also on calls that were sampled greedily, with truncation or with penalties."""
    critic_learning_rate: Positive = 1e-3
    """The learning rate of the critic, for algorithms that have one."""
    lora: AdapterConfig | None = None
    """Train LoRA adapters; None: train all weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory for about a third more computation."""
    compile: bool = True
    """On a GPU, compile the layers of the model: the first steps take longer, all others less time."""
    offload: Literal["none", "optimiser"] = "none"
    """`optimiser`: master weights and moments are in the memory of the host, which updates them: a GPU needs a third of
    the memory, and an update takes seconds more. The host needs 12 bytes for each parameter."""
    devices: AtLeastOne = 1
    """GPUs over which the policy is divided, by FSDP2 and with a process each; the engine has others. 1: it is trained
    in this process, on the GPU of the engine. On a CPU it is the number of processes."""
    device_timeout_s: Positive = 50.0
    """Several devices: seconds that their processes wait for one another before one of them counts as lost."""
    restarts: Count = 3
    """Several devices: how often a run whose training processes fail goes on by itself, from its checkpoint."""


class EvaluationConfig(_Section, frozen=True):
    """Evaluation on the held-out tasks."""

    every: Count = 10
    """Steps between evaluations; 0: only before the first step and after the last."""
    rollouts: AtLeastOne | None = None
    """Rollouts per held-out task. If unset: 1, and for fewer than 32 tasks up to 4, so that there are about 32."""
    success: Real = defaults.SUCCESS
    """The reward from which a rollout counts as solved, for pass@k."""


class CheckpointConfig(_Section, frozen=True):
    """Which checkpoints are written and kept. The best by held-out reward is always kept."""

    every: AtLeastOne = 10
    """Steps between checkpoints."""
    keep: AtLeastOne = 2
    """The latest checkpoints that are kept."""
    optimiser: bool = True
    """Save the optimiser's moments too: two thirds of a checkpoint. Without them a resumed run starts with new ones."""


class EngineConfig(_Section, frozen=True):
    """The engine that samples completions."""

    kind: Literal["auto", "torch", "vllm"] = "auto"
    """`torch`: embedded in the training process, or, where a GPU trains and samples at once
    (`training.max_staleness`), a process beside it; `vllm`: a vLLM server that Leyden starts and supervises.
    `auto`: vLLM if there is a CUDA device and vLLM is installed, else the embedded engine."""
    url: str | None = None
    """A vLLM server that runs already, for `kind = "vllm"`: `unix:/path/of/its.sock` or `http://host:port`. Start it
    with `python -m leyden.engine.vllm MODEL`."""
    replicas: AtLeastOne = 1
    """Engines that serve the same weights, each a process with its own devices. The calls of a rollout go to one of
    them; if it dies they go on at another, while it is started again."""
    tensor_parallel: AtLeastOne = 1
    """CUDA devices over which each vLLM server divides the model."""
    devices: tuple[Count, ...] = ()
    """The numbers of the CUDA devices of the replicas, `tensor_parallel` for each in turn; replicas may share one. If
    unset: the devices after the trainer's; a single replica on one device has the trainer's."""
    transfer: Literal["auto", "nccl"] = "auto"
    """How new weights reach vLLM: `auto` is CUDA IPC on the trainer's device and files on others; `nccl` is for other
    devices, and needs vLLM in the environment of the trainer."""
    slots: AtLeastOne | None = None
    """Requests that each replica computes at once; if unset: 64 on a CPU, 256 on a GPU, 1024 with vLLM."""
    memory: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """The share of the GPU's memory for weights and KV caches of engines; unset: what training leaves, up to 0.6."""
    vllm_python: str | None = None
    """The Python interpreter that has vLLM, if it is not the one that runs Leyden."""
    vllm_arguments: tuple[str, ...] = ()
    """More arguments of vLLM's server."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The precision in which engine and trainer compute; master weights and optimiser state are float32 in any case.
    `auto`: bfloat16 on a GPU, float32 on a CPU."""

    def __post_init__(self) -> None:
        needed = self.replicas * self.tensor_parallel
        if self.devices and len(self.devices) != needed:
            raise ValueError(
                f"`engine.devices` names {len(self.devices)} devices, and {self.replicas} replicas of "
                f"{self.tensor_parallel} devices need {needed}: name that many"
            )
        if self.tensor_parallel > 1 and self.kind == "torch":
            raise ValueError(
                '`engine.tensor_parallel` is for vLLM, and `engine.kind` is "torch": leave one of them out, or set '
                "`engine.replicas`"
            )
        if self.url is None:
            return
        if needed > 1 or self.devices:
            raise ValueError(
                "`engine.url` is one server that runs already: leave out `engine.replicas`, `engine.tensor_parallel` "
                "and `engine.devices`, or the URL"
            )
        if not self.url.startswith(("unix:/", "http://")):
            raise ValueError(f"`engine.url` is {self.url!r}: write unix:/path/of/its.sock or http://host:port")
        if self.kind == "torch":
            raise ValueError('`engine.url` is for vLLM, and `engine.kind` is "torch": leave one of them out')


HostPort = Annotated[str, Meta(pattern=r"^(\*|(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5})$")]


class WorkerConfig(_Section, frozen=True):
    """The workers that run agents on this machine."""

    processes: Count | None = None
    """Processes that run agents; 0: none on this machine, start `leyden worker` elsewhere. If unset: the cores of
    the machine without the four that trainer, server and engine use, from 1 to 16."""
    concurrency: AtLeastOne | None = None
    """The most rollouts at once, over all processes. If unset: 64, and 256 beside an engine on a GPU, but at least
    one for each process."""
    drain_s: NotNegative = 30.0
    """Seconds that the other rollouts of a process have to finish when one of them hangs, before it is ended."""
    isolation: Literal["none", "user", "sandbox", "auto"] = "none"
    """What agents are kept from: nothing, the files of other users, or all but their folder and the gateway."""
    network: tuple[HostPort, ...] = ()
    """`host:port` that sandboxes may reach besides the gateway; `*`: the network of the machine."""
    readable: tuple[str, ...] = ()
    """More folders that sandboxes show, read-only."""
    writable: tuple[str, ...] = ()
    """Folders that agents in sandboxes may write to, besides their scratch folder."""
    environment: tuple[str, ...] = ()
    """Names of environment variables that isolated agents inherit, besides those that any program needs; `*` stands
    for any text."""


RESERVED = ("task", "attempt", "result", "episode", "group")
"""Parameter names of agents and reward functions that cannot be names of services."""


class ServiceConfig(_Section, frozen=True):
    """A costly resource that a worker starts once and that one rollout uses at a time: an object or a command."""

    make: str | None = None
    """`module:name` or `file.py:name`: a class or a function without arguments, called in the process that uses it."""
    command: str | None = None
    """A command that starts a server; `{port}` is replaced by a free port."""
    count: Annotated[int, Meta(ge=1, le=10_000)] = 1
    """Instances per worker."""
    address: str = "http://127.0.0.1:{port}"
    """The address of a command that rollouts are given."""
    ready: str | None = None
    """How to see that a command is ready: a URL that answers, or a text that it prints; None: its port accepts
    connections."""
    start_limit_s: Positive = 60.0
    """Seconds that a command may take to be ready."""
    agent: bool = True
    """Whether agents that are commands or endpoints acquire one. Python agents request it by a parameter's name."""

    def __post_init__(self) -> None:
        if (self.make is None) == (self.command is None):
            raise ValueError("a service needs either `make` or `command`: set one of them")
        if self.command is not None and self.ready is None and "{port}" not in self.command:
            raise ValueError("`command` has no {port}: add it, or set `ready`")


UPSTREAM_KEY_VARIABLE = "LEYDEN_UPSTREAM_KEY"
"""The environment variable with the upstream's key; it is removed from the environment of agents."""
STORE_VARIABLE = "LEYDEN_STORE"
"""The environment variable with the URL of a server's database, which may have a password; removed like the key."""


class UpstreamConfig(_Section, frozen=True):
    """An OpenAI-compatible service for the model names in `routes`. Its key is in LEYDEN_UPSTREAM_KEY."""

    url: str | None = None
    timeout_s: Positive = defaults.UPSTREAM_TIMEOUT_S
    """Seconds that it may send nothing before a call fails."""

    def __post_init__(self) -> None:
        if self.url is not None and "@" in urlsplit(self.url).netloc:
            raise ValueError(
                "`upstream.url` has a user or a password, which pages and messages would show: leave them out, and put "
                f"the key into {UPSTREAM_KEY_VARIABLE} (`Basic BASE64` for a user and a password)"
            )


class ServerConfig(_Section, frozen=True):
    """The address of the server."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0: any free port."""
    advertise: str | None = None
    """The URL by which workers on other machines reach it; None: the address that it listens on."""
    concurrent_calls: Annotated[int, Meta(ge=1, le=4096)] = defaults.CONCURRENT_CALLS
    """The most requests that one rollout may have at the same time; more get a 429."""


class PolicyConfig(_Section, frozen=True):
    """One of several policies of a run: its weights, how they are trained, and whose calls it answers."""

    model: str | None = None
    """As `model` of the run; None: the same."""
    trained: bool = True
    """Whether it learns. Otherwise it stays as it is: a frozen copy, or an opponent."""
    of: PolicyName | None = None
    """The policy whose earlier versions it plays (self-play), each for a step. It is not trained."""
    pool: Literal["latest", "uniform", "win_rate"] = "uniform"
    """Which of the latest `pool_size` checkpoints of the policy `of` it plays: the latest; any; or rather those that
    the policy in training wins least against, by `evaluation.success`."""
    pool_size: AtLeastOne = 8
    upstream: bool = False
    """Whether `upstream.url` answers its calls in place of a model of the run, such as those of a judge."""
    models: tuple[str, ...] = ()
    """The model names that agents request of it; `*` stands for any text."""
    roles: tuple[Name, ...] = ()
    """The roles whose calls it answers, whatever model they request. A role must be known when a call is made: the call
    names it in its header or URL, or a rule of `roles` finds it. Without `models` and `roles` it answers all others."""
    rewards: tuple[Name, ...] = ()
    """Names of final rewards that count only for the policies that list them; all others count for every policy."""
    learning_rate: Positive | None = None
    """None: `training.learning_rate`, or the default for its model."""
    lora: AdapterConfig | bool | None = None
    """Train LoRA adapters, whose optimiser is not offloaded; false: train all weights; None: as `training.lora`."""
    algorithm: AlgorithmConfig | None = None
    """Keys of `algorithm` that are different for this policy."""

    def __post_init__(self) -> None:
        if self.upstream and self.model is not None:
            raise ValueError("a policy has a `model`, or `upstream = true`: leave one of them out")
        own = (self.model, self.learning_rate, self.lora, self.algorithm, self.upstream or None, self.rewards or None)
        if self.of is not None and any(one is not None for one in own):
            raise ValueError(
                "a policy that plays earlier versions (`of`) has their model and is not trained: leave out `model`, "
                "`upstream`, `learning_rate`, `lora`, `rewards` and `algorithm`"
            )

    @property
    def learns(self) -> bool:
        """Whether it is trained."""
        return self.trained and not self.upstream and self.of is None


Sink = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Config(_Section, frozen=True):
    """The configuration of a run."""

    run: Id
    """The name of the run; default: the file's name."""
    agent: str
    """`module:name` or `file.py:name` (a function or a class), a command, or the URL of an HTTP endpoint."""
    tasks: str
    """A file with one JSON object per line, an array of them (`.json`), CSV with a header (`.csv`) or Parquet; the
    folder of a data set of Hugging Face, or a pattern of its files."""
    reward: str | None = None
    """A function with any of the parameters `task`, `result`, `episode` and `group`, written as for `agent`; None: the
    number that the agent returns."""
    columns: dict[str, str] = {}
    """New names of columns of the task files, each with the name that it has there."""
    drop_duplicates: bool = False
    """Whether a task that a file has twice is dropped; otherwise it is an error."""
    held_out: str | Count | BelowOne = 0.1
    """The tasks for evaluation: a file, a number of the tasks, or a fraction of them."""
    test: str | Count | BelowOne = 0
    """The tasks that are evaluated once, at the end, with the best checkpoint: a file, a number of the tasks, or a
    fraction of them. The best checkpoint is chosen on the held-out tasks, so its reward there is optimistic. If none
    is better there than the model before training, that model is evaluated."""
    model: str = "spark"
    """`spark` (the bundled model), a folder, or a name on the Hugging Face Hub."""
    policy: PolicyName = DEFAULT_POLICY
    """The name of the policy that is trained: of its calls in the record, its checkpoints and its metrics."""
    policies: dict[PolicyName, PolicyConfig] = {}
    """By name, policies with weights of their own, in place of `policy`."""
    seed: Count = 0
    base: str = "."
    """The folder that files and modules are relative to; default: the folder of the configuration file."""
    home: str = "runs"
    """The folder that holds the folders of all runs."""
    deterministic: bool = False
    """Compute one request at a time, so that the same run gives the same weights. Slow."""
    report: tuple[Sink, ...] = ()
    """Loggers that metrics are sent to, in addition to the run's folder."""
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
    """By name, services that a worker starts once and that one rollout uses at a time."""
    routes: dict[str, Name | FixedAnswer] = {}
    """By model name, the name of a policy, `upstream` or `{answer = "..."}`; empty: the policy serves every name."""
    roles: dict[Name, str] = {}
    """By role, a regular expression for the system prompt of its calls; for agents that cannot set roles."""
    upstream: UpstreamConfig = field(default_factory=UpstreamConfig)

    def __post_init__(self) -> None:
        self._check_policies()
        if self.training.devices > 1 and self.policies:
            raise ValueError("`training.devices` trains one policy, and there are `policies`: leave one of them out")
        if any(device < self.training.devices for device in self.engine.devices) and self.training.devices > 1:
            raise ValueError(
                f"`engine.devices`: devices 0 to {self.training.devices - 1} train, and have no memory for an engine: "
                "name others, or leave it out"
            )
        if self.training.offload == "optimiser" and self.training.lora is not None:
            raise ValueError(
                "`training.offload`: the optimiser of `training.lora` takes little memory: leave one of them out"
            )
        if self.training.offload == "optimiser" and self.training.devices > 1:
            raise ValueError(
                "`training.offload` is for one device, and `training.devices` divides the optimiser over "
                f"{self.training.devices}: leave one of them out"
            )
        if self.deterministic and self.training.max_staleness:
            raise ValueError(
                "`training.max_staleness` is above 0, so what a step trains on depends on time, and `deterministic` is "
                "set: leave one of them out"
            )
        if self.deterministic and self.engine.replicas > 1:
            raise ValueError(
                "`engine.replicas` is above 1, so which one samples depends on time, and `deterministic` is set: leave "
                "one of them out"
            )
        for name in self.services:
            if not name.isidentifier() or name in RESERVED:
                raise ValueError(f"`services.{name}` cannot be the name of a parameter: choose another name")
        for model, server in self.routes.items():
            names = tuple(self.policies) or (self.policy,)
            if not isinstance(server, FixedAnswer) and server not in (*names, "upstream"):
                written = ", ".join((*names, 'upstream or {answer = "..."}'))
                raise ValueError(f"`routes`: {model!r} is served by {server!r}: write {written}")
            if server == "upstream" and self.upstream.url is None:
                raise ValueError(f"`routes`: {model!r} is served upstream: set `upstream.url`")
        for role, rule in self.roles.items():
            try:
                check_rule(rule)
            except PatternError as error:
                raise ValueError(f"`roles.{role}` cannot be used: {error}") from error
        algorithm, training, sampling = self.algorithm, self.training, self.sampling
        if (sampling.top_p < 1 or sampling.top_k or sampling.min_p) and not training.allow_biased_sampling:
            raise ValueError(
                "`sampling` truncates the distribution, and such calls are not trained on: "
                "remove `top_p`, `top_k` and `min_p`, or set `training.allow_biased_sampling = true`"
            )
        named = [algorithm, *(one.algorithm for one in self.policies.values() if one.algorithm is not None)]
        sampled = [one for one in named if one.credit == "sampled"]
        if sampled and sum(one.learns for one in self.policies.values()) > 1:
            raise ValueError(
                '`algorithm.credit = "sampled"` continues the rollouts of one policy, and `policies` trains several: '
                "choose another credit, or set `trained = false` for the others"
            )
        if not self.rollout.replay and (sampled or training.hard_tasks == "continue"):
            key = "algorithm.credit" if sampled else "training.hard_tasks"
            raise ValueError(f"`{key}` continues rollouts from the record, and `rollout.replay` is false: change one")
        if any(one.kl_in == "reward" or one.scale_steps for one in sampled):
            raise ValueError(
                '`algorithm.credit = "sampled"` compares the returns of a rollout and its continuations, which '
                "`scale_steps` and a KL penalty in the reward change: "
                'set `algorithm.scale_steps = false` and `algorithm.kl_in = "loss"`'
            )
        workers = self.workers
        if workers.concurrency is not None and workers.concurrency < (workers.processes or 0):
            raise ValueError(
                f"`workers.concurrency` is {workers.concurrency}, less than `workers.processes` "
                f"({workers.processes}): raise it, or lower the other"
            )
        if algorithm.correction_low > algorithm.correction_high:
            raise ValueError(
                f"`algorithm.correction_low` is {algorithm.correction_low}, "
                f"more than `algorithm.correction_high` ({algorithm.correction_high}): lower it, or raise the other"
            )
        if training.min_group > training.group_size:
            raise ValueError(
                f"`training.min_group` is {training.min_group}, more than `training.group_size` "
                f"({training.group_size}): set `training.min_group = {training.group_size}` at the most, or raise "
                "`training.group_size`"
            )
        if training.task_order == "by_difficulty" and training.group_size < 2:
            raise ValueError(
                "`training.task_order` is by_difficulty, which compares the rollouts of a task: "
                "set `training.group_size` to 2 or more"
            )
        if training.updates_per_step > training.tasks_per_step:
            raise ValueError(
                f"`training.updates_per_step` is {training.updates_per_step}, more than `training.tasks_per_step` "
                f"({training.tasks_per_step}), and a group is not divided: lower it, or raise `training.tasks_per_step`"
            )

    def _check_policies(self) -> None:
        """Refuse policies that answer the same calls, or that cannot be trained together."""
        for name in (self.policy, *self.policies):
            if name in _RESERVED_POLICIES:
                raise ValueError(f"a policy cannot be named {name!r}, which names calls that no policy answers")
        if not self.policies:
            return
        if self.policy != DEFAULT_POLICY:
            raise ValueError("`policy` names the only policy, and `policies` names several: leave one of them out")
        by_call = {("models", name): name for name in self.policies}
        for name, policy in self.policies.items():
            if policy.upstream and self.upstream.url is None:
                raise ValueError(f"`policies.{name}.upstream` is set: set `upstream.url` too")
            calls = [(key, one) for key in ("models", "roles") for one in getattr(policy, key)] or [("models", "*")]
            for call in calls:
                other = by_call.setdefault(call, name)
                if other != name:
                    which = f"`{call[0]}` with {call[1]!r}" if call[1] != "*" else "every other call"
                    raise ValueError(
                        f"`policies.{name}` and `policies.{other}` answer the same calls ({which}): "
                        "give each its own `models` or `roles`"
                    )
                if call[0] == "models" and self.routes.get(call[1], name) != name:
                    raise ValueError(
                        f"`policies.{name}` has the model {call[1]!r}, and so has `routes`: leave one of them out"
                    )
        trained = [name for name, policy in self.policies.items() if policy.learns]
        for name, policy in self.policies.items():
            if policy.of is not None and policy.of not in trained:
                known = " or ".join(trained) or "a policy"
                raise ValueError(f"`policies.{name}.of` is {policy.of!r}, which is not trained: name {known}")
            if policy.of is not None and self.training.max_staleness:
                raise ValueError(
                    f"`policies.{name}.of` plays one version in each step, and with `training.max_staleness` above 0 "
                    "the rollouts of a group could meet two: leave one of them out"
                )
        if not trained:
            raise ValueError("`policies` has none to train: set `trained = true` for one of them")
        if self.training.offload == "optimiser" and all(self.policies[name].lora for name in trained):
            raise ValueError(
                "`training.offload`: the optimisers of adapters take little memory, and all `policies` have `lora`: "
                "leave it out"
            )
        if len(trained) > 1 and self.training.early_gradient:
            raise ValueError(
                "`training.early_gradient` is for one policy, and `policies` trains several: leave it out, or set "
                "`trained = false` for the others"
            )
        if len(trained) > 1 and self.checkpoints.keep < 2:
            raise ValueError(
                "`checkpoints.keep` is 1, and several policies are saved one after the other: set it to 2 or more, so "
                "that there is always a step that all of them have"
            )
