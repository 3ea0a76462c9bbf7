"""Explains why a step has nothing to learn from."""

from collections.abc import Sequence

from leyden.episodes import Episode
from leyden.orchestrator.credit.samples import StepAccounting
from leyden.orchestrator.health.failures import NO_CALLS
from leyden.orchestrator.health.roles import no_such_roles


def nothing_to_learn(step: int, accounting: StepAccounting, episodes: Sequence[Episode]) -> str:
    """Return why all groups of a step were dropped, and what to change."""
    why = ", ".join(f"{count} {reason}" for reason, count in accounting.excluded.most_common())
    advice = "run `leyden dev` to see what your agent does"
    if not any(episode.calls for episode in episodes):
        advice = NO_CALLS
    if accounting.calls_excluded["role not selected"]:
        advice = no_such_roles({episode.role(call): None for episode in episodes for call in episode.calls})
    return f"step {step}: {accounting.groups_dropped} groups had too few rollouts to learn from ({why}): {advice}"
