"""The paper's assignment: every call has the return of its rollout."""

from leyden.rl.credit import Earned


def identical(earned: Earned) -> tuple[float, ...]:
    """V_t = r_final + sum of all r_t."""
    value = earned.final + sum(earned.steps)
    return (value,) * len(earned.steps)
