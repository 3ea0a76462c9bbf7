"""Only the last call that is trained on has credit: the return. The others are its context."""

from leyden.rl.credit import Earned
from leyden.rl.terms import Terms


def last_call(earned: Earned, terms: Terms) -> list[float | None]:
    """V of the last selected call = r_final + sum of all r_t."""
    last = max((call for call, selected in enumerate(earned.selected) if selected), default=None)
    return [earned.total if call == last else None for call in range(len(earned.steps))]
