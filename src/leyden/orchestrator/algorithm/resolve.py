"""Resolves the names in a configuration into the functions of an algorithm, and checks that they go together."""

import numpy as np
from msgspec import Struct

from leyden.config import AlgorithmConfig, Config, ConfigError, policy_configs, trained_policies
from leyden.config.policies import foreign_rewards
from leyden.learner.user_functions import load_algorithm, load_user_function
from leyden.orchestrator.algorithm.user_functions import CREDIT_FUNCTIONS
from leyden.orchestrator.credit.advantages import AdvantageEstimator, Compare
from leyden.orchestrator.credit.own_rewards import NO_FOREIGN_REWARDS, ForeignRewards
from leyden.orchestrator.credit.samples import SampleFilter
from leyden.rl import registry
from leyden.rl.advantage import CallBatch
from leyden.rl.branch import Branch
from leyden.rl.registry import Counted, Declaration, IncompatibleAlgorithms, Kind, UnknownAlgorithm, declaration
from leyden.rl.signals import SignalKind, SignalRules

_KINDS: tuple[Kind, ...] = ("credit", "advantage", "aggregation", "state", "branch")
"""Those that are not the learner's."""


class Algorithm(Struct, frozen=True):
    """The functions and rules that turn episodes into updates; the learner has those that turn updates into a loss."""

    sample_filter: SampleFilter
    advantage_estimator: AdvantageEstimator
    branch: Branch | None
    """Where rollouts are continued to estimate values; None: they are not."""
    critic: bool
    """Whether it reads a critic's values."""
    signals: SignalRules
    """The rules of automatic rewards."""
    kl_penalty: float
    """Weight of the penalty on rewards for the KL divergence from the reference; 0: there is none."""
    kl_loss: bool
    """Whether the loss has a KL divergence from the reference."""
    entropy: bool
    """Whether the loss has the entropy."""
    divides_by: Counted | None
    """The number of what divides the weights of an update; None: an aggregation of the user."""
    position_advice: str | None
    """What to change if the mean advantage depends on the position of calls; None: values do not differ by call, or
    nothing would be better."""

    @property
    def reference(self) -> bool:
        """Whether it needs the model that training started with."""
        return self.kl_penalty > 0 or self.kl_loss

    @property
    def trains_every_call(self) -> bool:
        """Whether calls without an advantage have a gradient as well."""
        return self.critic or self.kl_loss or self.entropy


def algorithms_of(config: Config) -> dict[str, Algorithm]:
    """Resolve the algorithm of each policy that is trained, by its name."""
    own, others = policy_configs(config), set(config.policies)
    return {
        name: algorithm_of(own[name], ForeignRewards(foreign_rewards(config, name), frozenset(others - {name})))
        for name in trained_policies(config)
    }


def algorithm_of(config: Config, foreign: ForeignRewards = NO_FOREIGN_REWARDS) -> Algorithm:
    """Resolve the algorithm that a configuration names; raise a `ConfigError` that says what to change.

    `foreign` are rewards that count for other policies.
    """
    named = config.algorithm
    try:
        _check(config)
        return Algorithm(
            sample_filter=SampleFilter(
                min_group=config.training.min_group,
                failure_reward=config.rollout.failure_reward,
                roles=config.training.roles or None,
                allow_biased_sampling=config.training.allow_biased_sampling,
                policy=config.policy,
                foreign=foreign,
            ),
            advantage_estimator=AdvantageEstimator(
                credit=load_algorithm("credit", config, CREDIT_FUNCTIONS),
                advantage=load_algorithm("advantage", config, CREDIT_FUNCTIONS),
                aggregation=load_algorithm("aggregation", config, CREDIT_FUNCTIONS),
                hyperparameters=named,
                level=named.level,
                state=load_algorithm("state", config, CREDIT_FUNCTIONS)
                if registry.reads("advantage", named, "state")
                else None,
                scale_steps=named.scale_steps,
                normalize_by=named.normalize_by,
                compare=_compare(named),
            ),
            branch=load_algorithm("branch", config, CREDIT_FUNCTIONS) if registry.branches(named) else None,
            critic=registry.needs_critic(named.credit, named.advantage),
            signals=_signals(config),
            kl_penalty=named.kl if named.kl_in == "reward" else 0.0,
            kl_loss=named.kl > 0 and named.kl_in == "loss",
            entropy=named.entropy > 0,
            divides_by=_divides_by(named),
            position_advice=_position_advice(named),
        )
    except (UnknownAlgorithm, IncompatibleAlgorithms) as error:
        raise ConfigError(str(error)) from error


def _check(config: Config) -> None:
    """Refuse algorithms that do not go together, or lack a setting."""
    named = config.algorithm
    registry.check_pair(named.credit, named.advantage, preferred=AlgorithmConfig().advantage)
    registry.check_settings(named, _KINDS)
    advantage = declaration("advantage", named.advantage)
    if config.training.flat_groups == "refill" and not _compares_group(config, advantage):
        raise ConfigError(
            f'`training.flat_groups = "refill"` replaces groups that have nothing to compare, and '
            f'`algorithm.advantage = "{named.advantage}"` does not compare the rollouts of a group: set one to another'
        )
    if config.training.early_gradient:
        _check_early_gradient(config, advantage)
    if advantage is not None and advantage.compares_group and config.training.group_size == 1:
        others = [
            f'`algorithm.advantage = "{name}"`'
            for name in registry.names("advantage")
            if registry.goes_with(named.credit, name)
            and (other := declaration("advantage", name)) is not None
            and not other.compares_group
        ]
        raise ConfigError(
            f'`training.group_size` is 1, and `algorithm.advantage = "{named.advantage}"` compares a group: '
            f"write {', or '.join(['2 or more', *others])}"
        )


def _divides_by(named: AlgorithmConfig) -> Counted | None:
    declared = declaration("aggregation", named.aggregation)
    return declared.divides_by if declared is not None else None


def _check_early_gradient(config: Config, advantage: Declaration | None) -> None:
    """Refuse to compute gradients of groups before the others have finished if that would be another gradient."""
    named, training, compare = config.algorithm, config.training, _compare(config.algorithm)
    within_group = advantage is not None and advantage.compares_group and "normalize_by" not in advantage.reads
    reasons = {
        f'`algorithm.advantage = "{named.advantage}"` compares all groups of a step': not within_group,
        f'`algorithm.compare = "{compare}"` expects of a call what other groups of the step have shown there, unlike '
        '"group"': compare not in ("group", None),
        f'`algorithm.aggregation = "{named.aggregation}"` may weigh a group by the others': _divides_by(named) is None,
        f'`algorithm.credit = "{named.credit}"` waits for continuations': registry.branches(named),
        "a step has several updates (`training.updates_per_step`, `training.epochs`)": (
            training.updates_per_step * training.epochs > 1
        ),
        "`training.max_staleness` is above 0, and training overlaps with sampling already": training.max_staleness > 0,
        "`deterministic` is set, and the order in which groups finish is not": config.deterministic,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"`training.early_gradient` cannot be set: {reason}; leave one of them out")


def _compares_group(config: Config, advantage: Declaration | None) -> bool:
    """Whether an advantage is 0 in a group whose values are all equal; that of a user is asked."""
    if advantage is not None:
        return advantage.compares_group or registry.reads("advantage", config.algorithm, "state")
    value, each = np.array([0.0, 0.0, 1.0, 1.0]), np.arange(4)
    flat = CallBatch(value, np.ones(4), each // 2, each, kind=each // 4, returns=value, baseline=value * 0, state=each)
    return not np.any(load_algorithm("advantage", config, CREDIT_FUNCTIONS)(flat, config.algorithm))


def _compare(named: AlgorithmConfig) -> Compare | None:
    """Return which calls are compared: by turn if values can differ by call, as those of a user's credit may."""
    if not registry.reads("advantage", named, "compare"):
        return None
    if named.compare != "auto":
        return named.compare
    return "turn" if _values_differ_by_call(named) else "group"


def _values_differ_by_call(named: AlgorithmConfig) -> bool:
    credit = declaration("credit", named.credit)
    return credit is None or credit.by_call


def _position_advice(named: AlgorithmConfig) -> str | None:
    compare = _compare(named)
    if compare is None or not _values_differ_by_call(named):
        return None
    if compare != "turn":
        return 'with `algorithm.compare = "turn"` a call is compared with those of its role and turn'
    if registry.is_user_function(named.advantage):
        return "compare values with `calls.expected` in your advantage function"
    return None


def _signals(config: Config) -> SignalRules:
    named = config.signals
    return SignalRules(
        weights={kind: getattr(named, kind) for kind in SignalKind},
        rule=None
        if named.rule is None
        else load_user_function("signals.rule", named.rule, config.base, CREDIT_FUNCTIONS["signals.rule"]),
        anneal_steps=named.anneal_steps,
        exempt=frozenset(named.exempt),
    )
