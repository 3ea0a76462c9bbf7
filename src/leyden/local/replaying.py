"""Runs rollouts again, answered from their own record: how much of them does the agent repeat token for token?"""

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from leyden.api.wire import GroupSpec
from leyden.episodes import Episode
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.records import Origin, Purpose

_NOT_ASKED = "the agent ended before it asked again"


class ReplayReport(Struct, frozen=True):
    """How much of the recorded rollouts an agent repeats if it gets the recorded answers."""

    prefixes: int
    """Recorded calls that were answered: a rollout can be continued after each."""
    exact: int
    """Those in which the agent asked what it had asked before, token for token."""
    differences: dict[str, int]
    """What differed first, and in how many rollouts, the commonest first."""

    @property
    def share(self) -> float:
        """The share of prefixes that replay exactly."""
        return self.exact / self.prefixes if self.prefixes else 1.0


async def replay_rollouts(collector: RolloutCollector, recorded: Sequence[Episode]) -> ReplayReport:
    """Run the agent again for each rollout and compare."""
    specs, origins = list[GroupSpec](), dict[str, Episode]()
    for number, episode in enumerate(recorded):
        if episode.calls:
            origin = Origin(episode.attempt.id, len(episode.calls))
            specs.append(GroupSpec(f"replay-{number}", episode.task, 1, Purpose.DEV, origin=origin))
            origins[specs[-1].id] = episode
    pairs = [(origins[spec.id], found[0]) async for spec, found in collector.gather(specs) if found]
    return compare(pairs)


def compare(pairs: Iterable[tuple[Episode, Episode]]) -> ReplayReport:
    """Compare recorded rollouts with what replayed them."""
    prefixes, exact, differences = 0, 0, Counter[str]()
    for recorded, replayed in pairs:
        answered = sum(map(recorded.stands, recorded.calls))
        repeated = sum(call.origin is not None for call in replayed.calls)
        prefixes, exact = prefixes + answered, exact + repeated
        if repeated < answered:
            left = replayed.attempt.diverged
            differences[_NOT_ASKED if left is None else f"call {left.number}: {left.why}"] += 1
    return ReplayReport(prefixes, exact, dict(differences.most_common()))
