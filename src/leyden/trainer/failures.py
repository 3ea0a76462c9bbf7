"""Ends a training whose agent fails on one task after the other; an agent that fails on some tasks trains on others."""

from collections import Counter
from collections.abc import Sequence

from leyden.episodes import Episode
from leyden.outcomes import Ending
from leyden.trainer.errors import TrainingError

_BASE_URL = (
    "it must call the one in OPENAI_BASE_URL or ANTHROPIC_BASE_URL (remove base_url=... and settings of .env files)"
)
NO_CALLS = f"no model call reached the gateway: does the agent set its own base URL? I{_BASE_URL[1:]}"
_MAX_AT_FIRST, _MAX_LATER = 8, 32
"""So many different tasks in a row may fail before the first success, and after it."""


def no_calls(error: str | None) -> str:
    """Say why no model call was recorded, with the error that ended the agent, if one did."""
    if error is None:
        return NO_CALLS
    failed = f"the agent failed before a model call reached the gateway: {error}"
    return f"{failed}. If that was its call of the model, the agent sets its own base URL: {_BASE_URL}"


class FailureStreak:
    """Counts the tasks since the last success."""

    def __init__(self, tasks: int) -> None:
        """`tasks` is how many different tasks the run has."""
        self._all, self._max = max(1, tasks), _MAX_AT_FIRST
        self._tasks: set[str] = set()
        self._errors: Counter[str] = Counter()
        self._calls = 0

    def add(self, episodes: Sequence[Episode]) -> None:
        """Count the rollouts that were requested together. Raises if too many tasks have failed in a row."""
        outcomes = [episode.attempt.outcome for episode in episodes if episode.attempt.outcome is not None]
        if any(outcome.ending is Ending.SUCCEEDED for outcome in outcomes):
            self._tasks.clear()
            self._errors.clear()
            self._calls = 0
            self._max = _MAX_LATER
            return
        self._calls += sum(len(episode.calls) for episode in episodes)
        self._tasks.update(episode.task.id for episode in episodes)
        self._errors.update(f"{outcome.ending}: {outcome.message}" for outcome in outcomes)
        if len(self._tasks) >= min(self._max, self._all):
            error, count = self._errors.most_common(1)[0]
            raise TrainingError(
                f"no rollout of {len(self._tasks)} different tasks in a row succeeded; "
                f"{count} of {self._errors.total()} ended {error}" + ("" if self._calls else f"; {NO_CALLS}")
            )
