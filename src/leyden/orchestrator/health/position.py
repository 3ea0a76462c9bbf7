"""Detects that the mean advantage of calls depends on their role and turn, though they could be compared by them.

The gradient is unbiased also then, but has more variance. Reported once. Advantages of a group depend on each other, so
errors are computed from the spread between groups.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from math import fsum, inf, log1p, sqrt

from leyden.estimates import clustered_error
from leyden.orchestrator.credit.samples import SituatedAdvantage
from leyden.rl.situation import Situation

_STEPS = 10
"""The last steps that are looked at together."""
_SIZE = 0.3
"""A mean advantage counts if it is at least this share of the root mean square of all advantages."""
_SHARE = 0.05
"""A position counts if at least this share of the calls is there."""
_GROUPS = 4
_ERRORS = 4.0
"""A mean that is this many standard errors from 0 is no chance, also if many positions are tested after each step."""


class PositionDetector:
    """Follows the advantages of calls by their situation."""

    def __init__(self, advice: str | None) -> None:
        """`advice` says what to change; without it nothing is reported."""
        self._advice = advice
        self._steps: deque[Sequence[SituatedAdvantage]] = deque(maxlen=_STEPS)

    def add_step(self, advantages: Sequence[SituatedAdvantage]) -> str | None:
        """Add the advantages of a step; return what is found and what to set, the first time that it is."""
        if self._advice is None:
            return None
        self._steps.append(advantages)
        found = _unlike_zero((step, one) for step, some in enumerate(self._steps) for one in some)
        if not found:
            return None
        shown = ", ".join(dict.fromkeys((found[0], found[-1])))
        advice, self._advice = self._advice, None
        return (
            f"the mean advantage of calls depends on their position: {shown}. This adds variance to the gradient "
            f"({advice})"
        )


def _unlike_zero(advantages: Iterable[tuple[int, SituatedAdvantage]]) -> list[str]:
    """Describe the situations whose mean advantage is not 0, from the highest to the lowest."""
    by_group: defaultdict[Situation, defaultdict[tuple[int, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, one in advantages:
        by_group[one.situation][step, one.group].append(one.advantage)
    every = [value for groups in by_group.values() for values in groups.values() for value in values]
    if not any(every):
        return []
    size = sqrt(fsum(value**2 for value in every) / len(every))
    found = []
    for situation, groups in by_group.items():
        totals = [(len(values), fsum(values)) for values in groups.values()]
        count = sum(number for number, _ in totals)
        mean, error = fsum(total for _, total in totals) / count, clustered_error(totals)
        if len(totals) < _GROUPS or error is None or count < _SHARE * len(every) or abs(mean) < _SIZE * size:
            continue
        if _normal(abs(mean) / error if error else inf, len(totals) - 1) > _ERRORS:
            found.append((mean, f"{mean:+.2f} ± {error:.2f} at {situation}"))
    return [text for _, text in sorted(found, reverse=True)]


def _normal(t: float, freedom: int) -> float:
    """Return how many standard errors of a normal distribution are as unlikely as `t` of Student's; after Wallace."""
    return (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log1p(t**2 / freedom))
