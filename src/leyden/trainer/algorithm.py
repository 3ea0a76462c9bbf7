"""What a configuration says of the way from rewards to a loss, found by its names."""

from msgspec import Struct

from leyden.config import Config, ConfigError
from leyden.rl.choosing import Unknown, choose
from leyden.rl.loss import Clip, Loss
from leyden.trainer.batch import Rules


class Algorithm(Struct, frozen=True):
    """How a run goes from episodes to a loss."""

    rules: Rules
    loss: Loss
    clip: Clip


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm that a configuration names; one that is not there is said before any work starts."""
    named = config.algorithm
    try:
        rules = Rules(
            credit=choose("credit", named.credit),
            advantage=choose("advantage", named.advantage),
            aggregation=choose("aggregation", named.aggregation),
            level=named.level,
            min_group=config.training.min_group,
            failure_reward=config.rollout.failure_reward,
            roles=config.training.roles or None,
        )
        return Algorithm(rules, choose("loss", named.loss), Clip(named.clip_low, named.clip_high))
    except Unknown as error:
        raise ConfigError(str(error)) from error
