"""Counts rollouts that begin inside another one, and what they replay."""

from statistics import fmean

from msgspec import Struct, field

from leyden.episodes import Episode


class BranchUsage(Struct):
    """Rollouts that replay the first calls of another one."""

    groups: set[str] = field(default_factory=set)
    rollouts: int = 0
    diverged: int = 0
    """Those that have not replayed all that they begin with: the agent asked something else, or ended before."""
    rewards: list[float] = field(default_factory=list)
    """Final rewards of the others."""
    replayed: int = 0
    sampled: int = 0
    """Tokens."""

    def add(self, episode: Episode, reward: float | None) -> None:
        """Add a rollout, unless it begins with its task."""
        if episode.rollout.origin is None:
            return
        self.groups.add(episode.rollout.group)
        self.rollouts += 1
        self.diverged += episode.left_origin
        if reward is not None and not episode.left_origin:
            self.rewards.append(reward)
        replayed = sum(len(call.completion_ids) for call in episode.calls if episode.inherits(call))
        self.replayed += replayed
        self.sampled += sum(len(call.completion_ids) for call in episode.calls) - replayed

    def metrics(self) -> dict[str, float]:
        """Return what a step reports, by name; nothing without such rollouts."""
        if not self.rollouts:
            return {}
        found = {
            "branches/groups": float(len(self.groups)),
            "branches/diverged": self.diverged / self.rollouts,
            "tokens/replayed": float(self.replayed),
            "tokens/branched": float(self.sampled),
        }
        return found | ({"branches/reward": fmean(self.rewards)} if self.rewards else {})
