"""What a configuration says of the way from rewards to a loss, found by its names."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from leyden.config import AlgorithmConfig, Config, ConfigError
from leyden.rl.choosing import Room, UnknownName, choose
from leyden.rl.hyperparameters import Hyperparameters
from leyden.rl.kl import ESTIMATES, Estimate
from leyden.rl.pairing import OF_GROUPS, IncompatibleChoice, check_pair, needs_critic
from leyden.rl.signals import SignalKind, SignalRules
from leyden.rl.states import StateKey, state_key
from leyden.trainer.algorithm.user_functions import load_user_function
from leyden.trainer.batch.advantages import AdvantageEstimator
from leyden.trainer.batch.samples import SampleFilter
from leyden.trainer.policy.objective import Objective

READ_BY: dict[str, tuple[Room, frozenset[str]]] = {
    "gamma": ("credit", frozenset({"discounted", "gae"})),
    "lam": ("credit", frozenset({"gae"})),
    "spread": ("credit", frozenset({"stepwise"})),
    "state": ("advantage", frozenset({"gigpo"})),
    "step_weight": ("advantage", frozenset({"gigpo"})),
    "normalize_by": ("advantage", frozenset({"reinforce_pp", "reinforce_pp_baseline", "ppo"})),
    "clip_low": ("loss", frozenset({"ppo_clip", "gspo"})),
    "clip_high": ("loss", frozenset({"ppo_clip", "gspo", "cispo"})),
    "clip_dual": ("loss", frozenset({"ppo_clip", "gspo"})),
    "length": ("aggregation", frozenset({"constant"})),
    "correction_level": ("correction", frozenset({"masked", "truncated"})),
    "correction_low": ("correction", frozenset({"masked"})),
    "correction_high": ("correction", frozenset({"masked", "truncated"})),
}
"""By key of the configuration: which of our functions read it. A user's own may read any."""


class KlPenalty(Struct, frozen=True):
    """A distance to the reference, and what each nat of it costs."""

    estimate: Estimate
    weight: float


class Algorithm(Struct, frozen=True):
    """How a run goes from episodes to a loss."""

    admission: SampleFilter
    valuation: AdvantageEstimator
    objective: Objective
    critic: bool
    """Whether it asks for a critic's values."""
    signals: SignalRules
    """What is given for what the record shows by itself."""
    penalty: KlPenalty | None
    """What is taken from the reward of a call for its distance to the reference."""

    @property
    def reference(self) -> bool:
        """Whether it asks for the model that training began with."""
        return self.penalty is not None or self.objective.kl is not None


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm that a configuration names; one that is not there is said before any work starts."""
    named = config.algorithm
    try:
        check_pair(named.credit, named.advantage)
        if named.aggregation == "constant" and named.length is None:
            raise ConfigError("`algorithm.aggregation` is constant: set `algorithm.length`, the tokens to divide by")
        if named.advantage in OF_GROUPS and config.training.group_size == 1:
            raise ConfigError(
                f'`training.group_size` is 1, and `algorithm.advantage = "{named.advantage}"` compares a group: '
                'write 2 or more, or `algorithm.advantage = "reinforce_pp"`'
            )
        terms = Hyperparameters(**{name: getattr(named, name) for name in Hyperparameters.__struct_fields__})
        return Algorithm(
            admission=SampleFilter(
                min_group=config.training.min_group,
                failure_reward=config.rollout.failure_reward,
                roles=config.training.roles or None,
                allow_biased_sampling=config.training.allow_biased_sampling,
            ),
            valuation=AdvantageEstimator(
                credit=_chosen("credit", config),
                advantage=_chosen("advantage", config),
                aggregation=_chosen("aggregation", config),
                terms=terms,
                level=named.level,
                state=_state(config) if named.advantage == "gigpo" or _is_own(named.advantage) else None,
                normalize_by=named.normalize_by,
            ),
            objective=_objective(config, terms),
            critic=needs_critic(named.credit, named.advantage),
            signals=_signals(config),
            penalty=KlPenalty(_estimate(named), named.kl) if named.kl > 0 and named.kl_in == "reward" else None,
        )
    except (UnknownName, IncompatibleChoice) as error:
        raise ConfigError(str(error)) from error


def idle(named: AlgorithmConfig) -> list[str]:
    """What was set and does nothing, because what would read it was not chosen; each in words."""
    untouched = AlgorithmConfig(kl_in=named.kl_in)
    idle = [
        f'`algorithm.{key}` does nothing with `{room} = "{getattr(named, room)}"`'
        for key, (room, readers) in READ_BY.items()
        if getattr(named, key) != getattr(untouched, key)
        and getattr(named, room) not in readers
        and not _is_own(getattr(named, room))
    ]
    if named.kl == 0 and (named.kl_in, named.kl_estimate) != ("loss", untouched.kl_estimate):
        idle.append("`algorithm.kl_in` and `algorithm.kl_estimate` do nothing while `algorithm.kl` is 0")
    return idle


def _chosen(room: Room, config: Config) -> Callable[..., Any]:
    name: str = getattr(config.algorithm, room)
    return load_user_function(f"algorithm.{room}", name, config.base) if _is_own(name) else choose(room, name)


def _state(config: Config) -> StateKey:
    name = config.algorithm.state
    return load_user_function("algorithm.state", name, config.base) if _is_own(name) else state_key(name)


def _is_own(name: str) -> bool:
    return ":" in name


def _signals(config: Config) -> SignalRules:
    named = config.signals
    return SignalRules(
        weights={kind: getattr(named, kind) for kind in SignalKind},
        rule=load_user_function("signals.rule", named.rule, config.base) if named.rule is not None else None,
        anneal_steps=named.anneal_steps,
        exempt=frozenset(named.exempt),
    )


def _estimate(named: AlgorithmConfig) -> Estimate:
    """Of the distance to the reference."""
    assert named.kl_estimate is not None, "a configuration that was read names one"
    return ESTIMATES[named.kl_estimate]


def _objective(config: Config, terms: Hyperparameters) -> Objective:
    named = config.algorithm
    return Objective(
        loss=_chosen("loss", config),
        terms=terms,
        correction=None if named.correction == "none" else _chosen("correction", config),
        level=named.correction_level,
        kl=_estimate(named) if named.kl > 0 and named.kl_in == "loss" else None,
        kl_weight=named.kl,
        entropy_weight=named.entropy,
    )
