"""What is wrong with the roles of calls: none is trained on, others change with them, or one is known too late."""

from collections.abc import Iterable, Mapping, Sequence

from leyden.documentation import page
from leyden.episodes import Episode
from leyden.extras import install_command
from leyden.learner.errors import TrainingError

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


def shared_weights(episodes: Sequence[Episode], trained: Sequence[str], policy: str) -> str | None:
    """Return a message that names the roles beside the trained ones and how to freeze them; None if there are none."""
    roles = dict.fromkeys(
        episode.role(call) or "(none)" for episode in episodes for call in episode.calls if call.policy == policy
    )
    others, own = [role for role in roles if role not in trained], [role for role in trained if role in roles]
    if not own or not others:
        return None
    shares, uses, it = ("shares", "it uses", "it") if len(others) == 1 else ("share", "they use", "them")
    return (
        f"{', '.join(others)} {shares} the weights of {', '.join(own)}: not trained on, but changed with them. "
        f"To freeze {it}, route the model name that {uses} to an upstream, such as a frozen copy: "
        f"leyden serve --model MODEL ({page('gateway', 'Roles')})"
    )


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
