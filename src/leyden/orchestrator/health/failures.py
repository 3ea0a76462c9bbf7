"""Ends a training whose agent fails on one task after the other, and warns if most rollouts of a step fail."""

import builtins
from collections import Counter
from collections.abc import Iterable, Sequence

from leyden.episodes import Episode
from leyden.learner.errors import TrainingError
from leyden.outcomes import MEANING, Ending, Outcome, general_message

_BASE_URL = (
    "it must call the one in OPENAI_BASE_URL, ANTHROPIC_BASE_URL or GOOGLE_GEMINI_BASE_URL "
    "(remove base_url=... and settings of .env files)"
)
NO_CALLS = f"no model call reached the gateway: does the agent set its own base URL? I{_BASE_URL[1:]}"
_OWN_MISTAKES = (LookupError, TypeError, NameError, AttributeError, ImportError, ArithmeticError)
"""Errors of Python that no call of a model raises."""
_MAX_AT_FIRST, _MAX_LATER = 8, 32
"""So many different tasks in a row may fail before the first success, and after it."""


def no_calls(error: str | None) -> str:
    """Say why no model call was recorded, with the error that ended the agent, if one did."""
    if error is None:
        return NO_CALLS
    failed = f"the agent failed before a model call reached the gateway: {error.rstrip('.')}"
    kind = getattr(builtins, error.partition(":")[0], None)
    if isinstance(kind, type) and issubclass(kind, _OWN_MISTAKES):
        return failed
    return f"{failed}. If that was its call of the model, the agent sets its own base URL: {_BASE_URL}"


def count_alike(outcomes: Iterable[Outcome]) -> list[tuple[Outcome, int]]:
    """Return one outcome of each kind and their number, the commonest first. Numbers in messages make no difference."""
    counts: Counter[tuple[Ending, str]] = Counter()
    examples: dict[tuple[Ending, str], Outcome] = {}
    for outcome in outcomes:
        kind = outcome.ending, general_message(outcome.message)
        counts[kind] += 1
        examples.setdefault(kind, outcome)
    return [(examples[kind], count) for kind, count in counts.most_common()]


def first_line(outcome: Outcome) -> str:
    """Return an ending with the first line of its message."""
    first, _, _ = outcome.message.strip().partition("\n")
    return f"{outcome.ending}: {first}"


class FailureShare:
    """Notices when more than half of the rollouts of a step or an evaluation fail, and again after it had stopped."""

    def __init__(self, run: str) -> None:
        self._run, self._failing = run, False

    def add(self, episodes: Sequence[Episode]) -> str | None:
        """Count rollouts that were requested together; return a warning if most of them fail now."""
        outcomes = [episode.attempt.outcome for episode in episodes if episode.attempt.outcome is not None]
        failed = [outcome for outcome in outcomes if MEANING[outcome.ending].reward == "failure_reward"]
        before, self._failing = self._failing, 2 * len(failed) > len(outcomes)
        if before or not self._failing:
            return None
        commonest, count = count_alike(failed)[0]
        return (
            f"{len(failed)} of {len(outcomes)} rollouts failed and have `failure_reward`; {count} of them ended "
            f"{first_line(commonest)} (leyden show {self._run} --outcome {commonest.ending})"
        )


class FailureStreak:
    """Counts the tasks since the last success."""

    def __init__(self, tasks: int) -> None:
        """`tasks` is how many different tasks the run has."""
        self._all, self._max = max(1, tasks), _MAX_AT_FIRST
        self._tasks: set[str] = set()
        self._outcomes: list[Outcome] = []
        self._calls = 0

    def add(self, episodes: Sequence[Episode]) -> None:
        """Count the rollouts that were requested together. Raises if too many tasks have failed in a row."""
        outcomes = [episode.attempt.outcome for episode in episodes if episode.attempt.outcome is not None]
        if any(outcome.ending is Ending.SUCCEEDED for outcome in outcomes):
            self._tasks.clear()
            self._outcomes.clear()
            self._calls = 0
            self._max = _MAX_LATER
            return
        self._calls += sum(len(episode.calls) for episode in episodes)
        self._tasks.update(episode.task.id for episode in episodes)
        self._outcomes += outcomes
        if len(self._tasks) >= min(self._max, self._all):
            commonest, count = count_alike(self._outcomes)[0]
            raise TrainingError(
                f"no rollout of {len(self._tasks)} different tasks in a row succeeded; "
                f"{count} of {len(self._outcomes)} ended {commonest.ending}: {commonest.message}"
                + ("" if self._calls else f"; {NO_CALLS}")
            )
