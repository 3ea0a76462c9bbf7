"""What calls of a step have in common by where they are in their rollouts: their role, and their turn.

A call's turn is its index among all calls of its rollout. Agents give a role and a turn a meaning (drafts, checks,
final answers), so a mean advantage that differs from 0 at one of them pushes it up or down whatever it says.
"""

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import NamedTuple

from leyden.episodes import Episode
from leyden.records import CallCredit
from leyden.rl.statistics import MAX_TURN
from leyden.trainer.report.labels import by_label


class CallPosition(NamedTuple):
    """Where a call is in its rollout."""

    role: str | None
    turn: int


class CallPositions:
    """The positions of the trained policy's calls of a step, with the length of their completions."""

    def __init__(self) -> None:
        self._position: dict[tuple[str, str], CallPosition] = {}
        """By attempt and call."""
        self._lengths: dict[CallPosition, list[float]] = {}

    def add(self, episode: Episode, policy: str) -> None:
        """Add the calls of a policy."""
        for turn, call in enumerate(episode.calls):
            if call.policy == policy:
                position = CallPosition(episode.role(call), turn)
                self._position[episode.attempt.id, call.id] = position
                self._lengths.setdefault(position, []).append(len(call.completion_ids))

    def advantages(self, credits: Iterable[CallCredit]) -> dict[CallPosition, list[float]]:
        """Return the advantages of the calls that have one, 0 included, by position."""
        found: dict[CallPosition, list[float]] = {}
        for credit in credits:
            position = self._position.get((credit.attempt, credit.call))
            if position is not None and credit.advantage is not None:
                found.setdefault(position, []).append(credit.advantage)
        return found

    def metrics(self, credits: Iterable[CallCredit]) -> dict[str, float]:
        """Return the mean length and the mean advantage of each role and of each turn."""
        found: dict[str, float] = {}
        for what, values in (("length", self._lengths), ("advantage", self.advantages(credits))):
            roles = {position: some for position, some in values.items() if position.role is not None}
            for kind, joined in (
                ("role", by_label(_join(roles, lambda position: str(position.role)))),
                ("turn", _join(values, lambda position: str(min(position.turn, MAX_TURN)))),
            ):
                found |= {f"{what}/{kind}/{label}": fmean(some) for label, some in joined.items()}
        return found


def _join(values: Mapping[CallPosition, list[float]], label: Callable[[CallPosition], str]) -> dict[str, list[float]]:
    joined: dict[str, list[float]] = {}
    for position, some in values.items():
        joined.setdefault(label(position), []).extend(some)
    return joined
