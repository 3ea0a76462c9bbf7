"""Explains why a step has nothing to learn from."""

from collections.abc import Iterable, Sequence

from leyden.documentation import page
from leyden.episodes import Episode
from leyden.extras import install_command
from leyden.orchestrator.credit.samples import StepAccounting
from leyden.orchestrator.health.failures import NO_CALLS

_HOW_ROLES_ARE_FOUND = (
    "A call has the role that it names, that of the span around it (LangChain, LangGraph, OpenAI Agents SDK: "
    f"{install_command('trace')}), or one whose rule in `[roles]` matches its system prompt "
    f"({page('gateway', 'Roles')})"
)


def no_such_roles(roles: Iterable[str | None]) -> str:
    """Return which roles there were, if none of them is trained on, and what to change."""
    names = [role or "(none)" for role in roles]
    advice = f"calls had the roles {', '.join(names)}; `training.roles` names those that are trained on"
    return f"{advice}. {_HOW_ROLES_ARE_FOUND}" if "(none)" in names else advice


def nothing_to_learn(step: int, accounting: StepAccounting, episodes: Sequence[Episode]) -> str:
    """Return why all groups of a step were dropped, and what to change."""
    why = ", ".join(f"{count} {reason}" for reason, count in accounting.excluded.most_common())
    advice = "run `leyden dev` to see what your agent does"
    if not any(episode.calls for episode in episodes):
        advice = NO_CALLS
    if accounting.calls_excluded["role not selected"]:
        advice = no_such_roles({episode.role(call): None for episode in episodes for call in episode.calls})
    return f"step {step}: {accounting.groups_dropped} groups had too few rollouts to learn from ({why}): {advice}"
