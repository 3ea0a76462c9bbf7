"""Collects the results of one step, from which metrics and the console's line are made."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

from msgspec import Struct, field

from leyden.config import Config
from leyden.engine.protocol import Publication
from leyden.episodes import Episode
from leyden.learner.protocol import UpdateMetrics
from leyden.orchestrator.credit.samples import StepAccounting
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.report.call_positions import CallPositions
from leyden.orchestrator.rollouts.branch_usage import BranchUsage
from leyden.orchestrator.rollouts.call_usage import CallUsage
from leyden.orchestrator.rollouts.evaluation import EvaluationResult
from leyden.process.usage import ResourceUse
from leyden.records import DEFAULT_POLICY, Call, RewardKind


class StepReport(Struct):
    """The results of one step."""

    step: int
    rewards: list[float]
    accounting: StepAccounting
    metrics: list[UpdateMetrics] = field(default_factory=list)
    automatic: list[float] = field(default_factory=list)
    """The automatic rewards of each rollout."""
    signals: Counter[str] = field(default_factory=Counter)
    """How often each signal gave an automatic reward."""
    sampled: int = 0
    """Sampled tokens."""
    branches: BranchUsage = field(default_factory=BranchUsage)
    """Rollouts that begin inside another one."""
    lengths: list[int] = field(default_factory=list)
    """Sampled tokens of each call."""
    rollout_lengths: list[int] = field(default_factory=list)
    """Sampled tokens of each rollout."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Sampled tokens by how many publications came after the one that sampled them."""
    by_role: dict[str, list[float]] = field(default_factory=dict)
    """By role, the rewards of the rollouts in which it made a call."""
    positions: CallPositions = field(default_factory=CallPositions)
    """Role and turn of each call of the trained policy."""
    usage: CallUsage = field(default_factory=CallUsage)
    """Calls and tool calls of the trained policy."""
    flat: dict[str, int] = field(default_factory=lambda: {"succeeded": 0, "failed": 0})
    """Groups whose final rewards are all equal: those that reach `evaluation.success`, and those below."""
    tasks: dict[str, float] = field(default_factory=dict)
    """How tasks were drawn by difficulty; empty if they were not."""
    by_kind: dict[str, list[float]] = field(default_factory=dict)
    """By kind of task (`algorithm.normalize_by`), the rewards of its rollouts."""
    sampled_now: int = 0
    """Tokens sampled during this step; others were sampled during steps before, or by an earlier process."""
    overlaps: bool = False
    """Whether agents go on while the step is trained."""
    started: float = 0.0
    """In seconds since 1970."""
    sampling_s: float = 0.0
    sampling_split: dict[str, float] = field(default_factory=dict)
    """The seconds of sampling by what the rollouts waited for; see `split_sampling`."""
    training_s: float = 0.0
    """From the preparation of the samples to the last optimiser step, without publishing."""
    waiting_s: float = 0.0
    """Before the weights changed, for the evaluation of the step before."""
    publication: Publication | None = None
    """How long publishing the weights after the last update took, and how much was transferred; None without one."""
    evaluation_s: float = 0.0
    learning_rate: float | None = None
    """None: the policy is not trained in this step."""
    kl_start: float | None = None
    """The divergence from the starting model before the step's updates, in nats a token; None if not measured."""
    held_out: EvaluationResult | None = None
    policy: str = DEFAULT_POLICY
    """The one that these are the results of; rewards, times and tasks are those of the rollouts of all."""
    own_rewards: list[float] = field(default_factory=list)
    """What counts for this policy of the rewards of each rollout, if others have rewards of their own."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """By name, the values of the parts that rewards have, without their weights."""
    use: ResourceUse | None = None
    """What the processes of the run used since the step before was reported."""

    def add_episodes(
        self, episodes: Sequence[Episode], publications: Publications, config: Config, automatic: bool
    ) -> None:
        """Add the rewards of rollouts and the tokens of the trained policy's calls.

        Automatic rewards are added if they are enabled.
        """
        kind = config.algorithm.normalize_by
        self.usage.add(episodes, [config.policy])
        self._count_flat_groups(episodes, config)
        for episode in episodes:
            own = [call for call in episode.calls if call.policy == config.policy and not episode.inherits(call)]
            self.count_tokens(own, publications)
            self.positions.add(episode, config.policy)
            if automatic:
                given = [reward for reward in episode.effective_rewards if reward.kind is RewardKind.AUTOMATIC]
                self.signals.update(reward.name.partition("/")[0] for reward in given)
                self.automatic.append(sum(reward.weight * reward.value for reward in given))
            reward = episode.final_reward(config.rollout.failure_reward)
            self.branches.add(episode, reward)
            if reward is not None and episode.rollout.origin is None:
                self.rewards.append(reward)
                for name, value in episode.reward_parts.items():
                    self.parts.setdefault(name, []).append(value)
                for role in {episode.role(call) for call in episode.calls} - {None}:
                    self.by_role.setdefault(str(role), []).append(reward)
                if kind is not None:
                    self.by_kind.setdefault(str(episode.task.input.get(kind)), []).append(reward)

    def _count_flat_groups(self, episodes: Sequence[Episode], config: Config) -> None:
        rewards_G: dict[str, list[float]] = {}
        for episode in episodes:
            if (reward := episode.final_reward(config.rollout.failure_reward)) is not None:
                rewards_G.setdefault(episode.rollout.group, []).append(reward)
        for rewards in rewards_G.values():
            if len(rewards) > 1 and min(rewards) == max(rewards):
                self.flat["succeeded" if rewards[0] >= config.evaluation.success else "failed"] += 1

    def count_tokens(self, calls: Sequence[Call], publications: Publications) -> None:
        """Add the tokens of some calls of one rollout."""
        lengths = [len(call.completion_ids) for call in calls]
        self.lengths += lengths
        self.rollout_lengths.append(sum(lengths))
        for run in (run for call in calls for run in call.versions):
            self.staleness[publications.staleness(run.number)] += run.tokens
        self.sampled += sum(lengths)
        self.sampled_now += sum(len(call.completion_ids) for call in calls if call.started >= self.started)

    @property
    def sampling_speed(self) -> float | None:
        """Sampled tokens per second; None if they were sampled before."""
        if self.overlaps:
            tokens, seconds = self.sampled, self.sampling_s + self.training_s + self.waiting_s + self.publishing_s
        else:
            tokens, seconds = self.sampled_now, self.sampling_s
        return tokens / seconds if tokens and seconds > 0 else None

    @property
    def publishing_s(self) -> float:
        """How long the engine took to serve new weights."""
        return self.publication.seconds if self.publication is not None else 0.0

    @property
    def entropy(self) -> float | None:
        """The mean entropy of the updates; None without an update that has one."""
        found = [value for one in self.metrics if (value := one.statistics.get("entropy")) is not None]
        return fmean(found) if found else None

    @property
    def reward(self) -> float | None:
        """The mean reward of the rollouts that count."""
        return fmean(self.rewards) if self.rewards else None

    @property
    def spread(self) -> float:
        """The standard deviation of those rewards."""
        return stdev(self.rewards) if len(self.rewards) > 1 else 0.0
