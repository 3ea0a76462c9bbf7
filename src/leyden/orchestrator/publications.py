"""The versions of the weights that were published, and how far tokens are behind them."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from leyden.records import Call


class Publications:
    """The latest publications of one policy, as many as `training.max_staleness` looks back to.

    The staleness of a token is the number of publications after the one that sampled it. The updates of a step are
    published as one. A token that was sampled between them counts as one of the publication before.
    """

    def __init__(self, max_staleness: int, versions: Iterable[int]) -> None:
        """`versions` were published so far, at least one."""
        self.max_staleness = max_staleness
        self._versions = list(versions)[-max_staleness - 1 :]

    @property
    def versions(self) -> tuple[int, ...]:
        """The latest versions, oldest first."""
        return tuple(self._versions)

    @property
    def newest(self) -> int:
        """The version that is served."""
        return self._versions[-1]

    def add(self, version: int) -> None:
        """Add a publication; serving the same version again is none."""
        if version != self.newest:
            self._versions = [*self._versions, version][-self.max_staleness - 1 :]

    def staleness(self, version: int) -> int:
        """Return how many publications came after a version; `max_staleness + 1` stands for more."""
        if version < self._versions[0]:
            return self.max_staleness + 1
        return len(self._versions) - bisect_right(self._versions, version)

    def fresh(self, call: Call, tokens: Sequence[int]) -> Sequence[int]:
        """Return those of some completion tokens of a call that may still be trained on."""
        stale = [self.staleness(run.number) > self.max_staleness for run in call.versions]
        if not any(stale):
            return tokens
        old = [one for run, is_old in zip(call.versions, stale, strict=True) for one in [is_old] * run.tokens]
        return [index for index in tokens if not old[index]]
