"""The paper's assignment: every call has the return of its rollout."""

from leyden.rl.credit import Earned
from leyden.rl.terms import Terms


def identical(earned: Earned, terms: Terms) -> list[float]:
    """V_t = r_final + sum of all r_t."""
    return [earned.total] * len(earned.steps)
