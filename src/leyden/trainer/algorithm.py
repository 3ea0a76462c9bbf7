"""What a configuration says of the way from rewards to a loss, found by its names."""

import sys
from pathlib import Path

from msgspec import Struct

from leyden.config import AlgorithmConfig, Config, ConfigError, SignalsConfig
from leyden.rl.choosing import Unknown, choose, imported
from leyden.rl.kl import ESTIMATES, Estimate
from leyden.rl.pairing import OF_GROUPS, Mismatch, check_pair, needs_critic
from leyden.rl.signals import SignalKind, SignalRules
from leyden.rl.states import state_key
from leyden.rl.terms import Terms
from leyden.trainer.batch import Admission
from leyden.trainer.objective import Objective
from leyden.trainer.valuing import Valuation


class Penalty(Struct, frozen=True):
    """A distance to the reference, and what each nat of it costs."""

    estimate: Estimate
    weight: float


class Algorithm(Struct, frozen=True):
    """How a run goes from episodes to a loss."""

    admission: Admission
    valuation: Valuation
    objective: Objective
    critic: bool
    """Whether it asks for a critic's values."""
    signals: SignalRules
    """What is given for what the record shows by itself."""
    penalty: Penalty | None
    """What is taken from the reward of a call for its distance to the reference."""

    @property
    def reference(self) -> bool:
        """Whether it asks for the model that training began with."""
        return self.penalty is not None or self.objective.kl is not None


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm that a configuration names; one that is not there is said before any work starts."""
    named = config.algorithm
    if (base := str(Path(config.base).resolve())) not in sys.path:
        sys.path.append(base)  # where a user's own functions are
    try:
        check_pair(named.credit, named.advantage)
        if named.aggregation == "constant" and named.length is None:
            raise ConfigError("`algorithm.aggregation` is constant: set `algorithm.length`, the tokens to divide by")
        if named.advantage in OF_GROUPS and config.training.group_size == 1:
            raise ConfigError(
                f'`training.group_size` is 1, and `algorithm.advantage = "{named.advantage}"` compares a group: '
                'write 2 or more, or `algorithm.advantage = "reinforce_pp"`'
            )
        terms = Terms(**{name: getattr(named, name) for name in Terms.__struct_fields__})
        return Algorithm(
            admission=Admission(
                min_group=config.training.min_group,
                failure_reward=config.rollout.failure_reward,
                roles=config.training.roles or None,
            ),
            valuation=Valuation(
                credit=choose("credit", named.credit),
                advantage=choose("advantage", named.advantage),
                aggregation=choose("aggregation", named.aggregation),
                terms=terms,
                level=named.level,
                state=state_key(named.state) if named.advantage == "gigpo" or ":" in named.advantage else None,
                mixture=named.mixture,
            ),
            objective=_objective(named, terms),
            critic=needs_critic(named.credit, named.advantage),
            signals=_signals(config.signals),
            penalty=Penalty(_estimate(named), named.kl) if named.kl > 0 and named.kl_in == "reward" else None,
        )
    except (Unknown, Mismatch) as error:
        raise ConfigError(str(error)) from error


def _signals(named: SignalsConfig) -> SignalRules:
    return SignalRules(
        weights={kind: getattr(named, kind) for kind in SignalKind},
        rule=imported("signals.rule", named.rule) if named.rule is not None else None,
        anneal_steps=named.anneal_steps,
        exempt=frozenset(named.exempt),
    )


def _estimate(named: AlgorithmConfig) -> Estimate:
    """Of the distance to the reference; in the reward it has to be unbiased, and may have either sign."""
    return ESTIMATES[named.kl_estimate or ("k1" if named.kl_in == "reward" else "k3")]


def _objective(named: AlgorithmConfig, terms: Terms) -> Objective:
    return Objective(
        loss=choose("loss", named.loss),
        terms=terms,
        correction=None if named.correction == "none" else choose("correction", named.correction),
        level=named.correction_level,
        kl=_estimate(named) if named.kl > 0 and named.kl_in == "loss" else None,
        kl_weight=named.kl,
        entropy_weight=named.entropy,
    )
