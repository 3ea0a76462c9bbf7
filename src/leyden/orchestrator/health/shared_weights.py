"""Says which roles are not trained on and change nevertheless, because they use the weights that are trained."""

from collections.abc import Sequence

from leyden.documentation import page
from leyden.episodes import Episode


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
