"""What calls of a step have in common by where they are in their rollouts: their role, and their turn.

A call's turn is that of its situation, by which `algorithm.compare = "turn"` compares: it is counted in a conversation.
"""

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from leyden.episodes import Episode
from leyden.orchestrator.report.labels import by_label
from leyden.records import CallCredit
from leyden.rl.situation import MAX_TURN, Situation, situations


class CallPositions:
    """The situations of the trained policy's calls of a step, with the length of their completions."""

    def __init__(self) -> None:
        self._situation: dict[tuple[str, str], Situation] = {}
        """By attempt and call."""
        self._lengths: dict[Situation, list[float]] = {}

    def add(self, episode: Episode, policy: str) -> None:
        """Add the calls of a policy."""
        for call, situation in zip(episode.calls, situations(episode), strict=True):
            if call.policy == policy:
                self._situation[episode.attempt.id, call.id] = situation
                self._lengths.setdefault(situation, []).append(len(call.completion_ids))

    def advantages(self, credits: Iterable[CallCredit]) -> dict[Situation, list[float]]:
        """Return the advantages of the calls that have one, 0 included, by situation."""
        found: dict[Situation, list[float]] = {}
        for credit in credits:
            situation = self._situation.get((credit.attempt, credit.call))
            if situation is not None and credit.advantage is not None:
                found.setdefault(situation, []).append(credit.advantage)
        return found

    def metrics(self, credits: Iterable[CallCredit]) -> dict[str, float]:
        """Return the mean length and the mean advantage of each role and of each turn."""
        found: dict[str, float] = {}
        for what, values in (("length", self._lengths), ("advantage", self.advantages(credits))):
            roles = {situation: some for situation, some in values.items() if situation.role is not None}
            for kind, joined in (
                ("role", by_label(_join(roles, lambda situation: str(situation.role)))),
                ("turn", _join(values, lambda situation: str(min(situation.turn, MAX_TURN)))),
            ):
                found |= {f"{what}/{kind}/{label}": fmean(some) for label, some in joined.items()}
        return found


def _join(values: Mapping[Situation, list[float]], label: Callable[[Situation], str]) -> dict[str, list[float]]:
    joined: dict[str, list[float]] = {}
    for situation, some in values.items():
        joined.setdefault(label(situation), []).extend(some)
    return joined
