"""Refuses roles of policies that only spans know: which policy answers a call is decided before its span arrives."""

from collections.abc import Mapping, Sequence

from leyden.documentation import page
from leyden.episodes import Episode
from leyden.learner.errors import TrainingError


def check_roles(episodes: Sequence[Episode], role_routes: Mapping[str, str]) -> None:
    """Raise if a call has a role that a policy answers, and another policy has answered it."""
    for episode in episodes if role_routes else ():
        for call in episode.calls:
            role = episode.role(call)
            routed = role_routes.get(role or "")
            if routed is not None and call.policy != routed and call.role is None:
                raise TrainingError(
                    f"calls of the role {role!r} are those of the policy {routed!r}, and {call.policy!r} has answered "
                    "one: its role is known only from a span, which arrives after the call. Name the role in the "
                    "header `x-leyden-role` or in the base URL, write a rule in `[roles]` for its system prompt, or "
                    f"list a model name of its own in `policies.{routed}.models` ({page('gateway', 'Roles')})"
                )
