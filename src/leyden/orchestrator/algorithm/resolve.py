"""Resolves the names in a configuration into the functions of an algorithm, and checks that they go together."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from leyden.config import AlgorithmConfig, Config, ConfigError
from leyden.learner.objective import Objective
from leyden.orchestrator.algorithm.user_functions import load_user_function
from leyden.orchestrator.credit.advantages import AdvantageEstimator, Compare
from leyden.orchestrator.credit.samples import SampleFilter
from leyden.rl import registry
from leyden.rl.kl import ESTIMATES, Estimate
from leyden.rl.registry import KINDS, IncompatibleAlgorithms, Kind, UnknownAlgorithm, declaration
from leyden.rl.signals import SignalKind, SignalRules


class KlPenalty(Struct, frozen=True):
    """A penalty on the reward of a call for its KL divergence from the reference."""

    estimate: Estimate
    weight: float


class Algorithm(Struct, frozen=True):
    """The functions and rules that turn episodes into a loss."""

    sample_filter: SampleFilter
    advantage_estimator: AdvantageEstimator
    objective: Objective
    critic: bool
    """Whether it reads a critic's values."""
    signals: SignalRules
    """The rules of automatic rewards."""
    kl_penalty: KlPenalty | None
    """None: the reward has no KL penalty."""
    position_advice: str | None
    """What to change if the mean advantage depends on the position of calls; None: values do not differ by call, or
    nothing would be better."""

    @property
    def reference(self) -> bool:
        """Whether it needs the model that training started with."""
        return self.kl_penalty is not None or self.objective.kl is not None


def algorithm_of(config: Config) -> Algorithm:
    """Resolve the algorithm that a configuration names; raise a `ConfigError` that says what to change."""
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
            ),
            advantage_estimator=AdvantageEstimator(
                credit=_function("credit", config),
                advantage=_function("advantage", config),
                aggregation=_function("aggregation", config),
                hyperparameters=named,
                level=named.level,
                state=_function("state", config) if _reads("advantage", named, "state") else None,
                scale_steps=named.scale_steps,
                normalize_by=named.normalize_by,
                compare=_compare(named),
            ),
            objective=_objective(config),
            critic=registry.needs_critic(named.credit, named.advantage),
            signals=_signals(config),
            kl_penalty=KlPenalty(_estimate(named), named.kl) if named.kl > 0 and named.kl_in == "reward" else None,
            position_advice=_position_advice(named),
        )
    except (UnknownAlgorithm, IncompatibleAlgorithms) as error:
        raise ConfigError(str(error)) from error


def unused_settings(named: AlgorithmConfig) -> list[str]:
    """List the keys that were set and that none of the chosen algorithms reads, each as a sentence."""
    defaults = AlgorithmConfig(kl_in=named.kl_in)
    unused = []
    for key in AlgorithmConfig.__struct_fields__:
        kinds = registry.readers(key) if getattr(named, key) != getattr(defaults, key) else {}
        if kinds and not any(_reads(kind, named, key) for kind in kinds):
            chosen = " and ".join(f'`{kind} = "{getattr(named, kind)}"`' for kind in kinds)
            does = "only splits the curves of rewards" if key == "normalize_by" else "does nothing"
            unused.append(f"`algorithm.{key}` {does} with {chosen}")
    if named.kl == 0 and (named.kl_in, named.kl_estimate) != ("loss", defaults.kl_estimate):
        unused.append("`algorithm.kl_in` and `algorithm.kl_estimate` do nothing while `algorithm.kl` is 0")
    if named.value_clip is not None and not registry.needs_critic(named.credit, named.advantage):
        unused.append('`algorithm.value_clip` does nothing without a critic, which `algorithm.credit = "gae"` has')
    if named.correction_ratio == "geometric" and (named.correction == "none" or named.correction_level == "token"):
        unused.append('`algorithm.correction_ratio` does nothing unless `correction_level` is "call" or "rollout"')
    return unused


def _check(config: Config) -> None:
    """Refuse algorithms that do not go together, or lack a setting."""
    named = config.algorithm
    registry.check_pair(named.credit, named.advantage, preferred=AlgorithmConfig().advantage)
    for kind in KINDS:
        declared = declaration(kind, getattr(named, kind))
        for key in declared.requires if declared is not None else ():
            if getattr(named, key) is None:
                raise ConfigError(f"`algorithm.{kind}` is {getattr(named, kind)}: set `algorithm.{key}`")
    advantage = declaration("advantage", named.advantage)
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


def _function(kind: Kind, config: Config) -> Callable[..., Any]:
    name: str = getattr(config.algorithm, kind)
    if _is_user_function(name):
        return load_user_function(f"algorithm.{kind}", name, config.base)
    return registry.load(kind, name)


def _reads(kind: Kind, named: AlgorithmConfig, key: str) -> bool:
    """Whether the chosen algorithm of a kind reads a key; a user's function may read any."""
    name: str = getattr(named, kind)
    declared = declaration(kind, name)
    return _is_user_function(name) or (declared is not None and key in declared.reads)


def _is_user_function(name: str) -> bool:
    return ":" in name


def _compare(named: AlgorithmConfig) -> Compare | None:
    """Return which calls are compared: by turn if values can differ by call, as those of a user's credit may."""
    if not _reads("advantage", named, "compare"):
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
    if _is_user_function(named.advantage):
        return "compare values with `calls.expected` in your advantage function"
    return None


def _signals(config: Config) -> SignalRules:
    named = config.signals
    return SignalRules(
        weights={kind: getattr(named, kind) for kind in SignalKind},
        rule=load_user_function("signals.rule", named.rule, config.base) if named.rule is not None else None,
        anneal_steps=named.anneal_steps,
        exempt=frozenset(named.exempt),
    )


def _estimate(named: AlgorithmConfig) -> Estimate:
    """Return the estimator of the KL divergence from the reference."""
    assert named.kl_estimate is not None, "`AlgorithmConfig` sets a default"
    return ESTIMATES[named.kl_estimate]


def _objective(config: Config) -> Objective:
    named = config.algorithm
    return Objective(
        loss=_function("loss", config),
        hyperparameters=named,
        correction=None if named.correction == "none" else _function("correction", config),
        level=named.correction_level,
        kl=_estimate(named) if named.kl > 0 and named.kl_in == "loss" else None,
        kl_weight=named.kl,
        entropy_weight=named.entropy,
        geometric=named.correction_ratio == "geometric",
        value_clip=named.value_clip,
    )
