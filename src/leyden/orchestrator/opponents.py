"""Self-play: policies that are earlier versions of a policy in training, chosen for each step from a pool.

All rollouts of a step meet the same version, so those of a group compare. The choice follows from seed, step and pool,
and the pool is in the checkpoint: a step that is repeated after a kill meets the version that it met before.
Evaluations meet the model before training, so that those of different steps compare.
"""

from collections.abc import Sequence
from random import Random

from msgspec.structs import replace

from leyden.config import Config, PolicyConfig
from leyden.episodes import Episode
from leyden.learner.protocol import PooledVersion
from leyden.orchestrator.credit.own_rewards import ForeignRewards
from leyden.orchestrator.publisher import Publisher


class Opponent:
    """One policy that plays earlier versions of another."""

    def __init__(
        self, name: str, config: Config, publisher: Publisher, foreign: ForeignRewards, pool: Sequence[PooledVersion]
    ) -> None:
        """`foreign` are the rewards that do not count for the policy in training; an empty pool has its first model."""
        self.name, self._config, self._publisher, self._foreign = name, config, publisher, foreign
        self._rule: PolicyConfig = config.policies[name]
        self.pool = tuple(pool) or (PooledVersion(),)
        self._served = 0
        """The step whose version is served."""

    async def begin_step(self, step: int) -> None:
        """Serve the version that the rollouts of a step meet."""
        await self._serve(self._choose(step))

    async def begin_evaluation(self) -> None:
        """Serve the model before training."""
        await self._serve(0)

    def add_results(self, episodes: Sequence[Episode]) -> None:
        """Count in how many rollouts the policy in training has succeeded against the version that is served.

        Those that begin inside another rollout do not count: it may have met another version there.
        """
        rewards = self._foreign.final_rewards(episodes, self._config.rollout.failure_reward)
        won = sum(reward >= self._config.evaluation.success for reward in rewards)
        self.pool = tuple(
            replace(one, won=one.won + won, played=one.played + len(rewards)) if one.step == self._served else one
            for one in self.pool
        )

    def add_version(self, step: int) -> None:
        """Add a checkpoint, in place of the oldest if the pool is full."""
        size = 1 if self._rule.pool == "latest" else self._rule.pool_size
        self.pool = tuple([*(one for one in self.pool if one.step != step), PooledVersion(step)][-size:])

    def _choose(self, step: int) -> int:
        if self._rule.pool == "latest":
            return self.pool[-1].step
        weights = [1.0 if self._rule.pool == "uniform" else one.lost_rate for one in self.pool]
        (chosen,) = Random(f"{self._config.seed}/{self.name}/{step}").choices(self.pool, weights)
        return chosen.step

    async def _serve(self, step: int) -> None:
        if step != self._served:
            await self._publisher.publish_checkpoint(step)
            self._served = step
