"""Detects that a run collapses: its entropy or its held-out reward falls far below what it was. Reports each once."""

from collections.abc import Mapping, Sequence
from math import hypot
from statistics import median
from typing import Any, Self

_FIRST_STEPS = 5
"""The entropy at the start is the median over this many steps."""
_ENTROPY_SHARE = 0.1
"""The entropy has collapsed when it is below this share of that at the start."""
_ERRORS, _REWARD_SHARE = 3.0, 0.1
"""The held-out reward has collapsed when it is below the best by more than this many standard errors of the difference,
and by more than this share of the best."""


class CollapseDetector:
    """Follows the entropy and the held-out reward of a run."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._best: tuple[float, float, int] | None = None
        """Reward, standard error and step of the best evaluation; of equal ones the later."""
        self._reported: set[str] = set()

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Self:
        """Continue from the metrics of a run that resumes; what they show is not reported again."""
        detector = cls()
        for line in lines:
            detector.add_entropy(line.get("training/entropy"))
            detector.add_held_out(line["step"], line.get("held_out/reward"), line.get("held_out/error"))
        return detector

    def add_entropy(self, entropy: float | None) -> str | None:
        """Add the entropy of a step; return what is wrong, the first time that it is."""
        if entropy is None:
            return None
        if len(self._first) < _FIRST_STEPS:
            self._first.append(entropy)
            return None
        start = median(self._first)
        if entropy >= _ENTROPY_SHARE * start:
            return None
        return self._report(
            "entropy",
            f"the entropy has collapsed: it is {entropy:.3g}, and was {start:.3g} at the start, so the rollouts of a "
            "group become alike (lower `training.learning_rate`, or raise `algorithm.kl` or `algorithm.entropy`)",
        )

    def add_held_out(self, step: int, reward: float | None, error: float | None) -> str | None:
        """Add the held-out reward of a step; return what is wrong, the first time that it is."""
        if reward is None:
            return None
        if self._best is None or reward >= self._best[0]:
            self._best = (reward, error or 0.0, step)
            return None
        best, best_error, best_step = self._best
        if best - reward <= max(_ERRORS * hypot(error or 0.0, best_error), _REWARD_SHARE * abs(best)):
            return None
        return self._report(
            "held-out reward",
            f"the held-out reward has collapsed: it is {reward:.3f}, and was {best:.3f} at step {best_step}",
        )

    def _report(self, what: str, message: str) -> str | None:
        if what in self._reported:
            return None
        self._reported.add(what)
        return message
