"""Detects that engine and trainer disagree about the probabilities of sampled tokens. Reports each kind once.

The mismatch is KL(sampler || policy at the start of the step), estimated by k3. Bfloat16 on both sides gives about
1e-4 to 1e-3 a token; a run whose sampler computes something else has far more, and its gradients are biased.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

_HIGH = 0.05
"""A mismatch of the first steps above this is not rounding."""
_FIRST_STEPS, _LAST_STEPS = 3, 20
_JUMP, _JUMP_FLOOR = 10.0, 0.01
"""A later mismatch is a jump if it is this many times the median of the steps before it, and above the floor."""
_LATE_TURNS = 5.0
"""The mismatch grows with the turns if that of the last turn is this many times that of the first."""
_KL = "kl_sampler_k3"


class MismatchDetector:
    """Follows the mismatch of the steps of one process."""

    def __init__(self) -> None:
        self._before: deque[float] = deque(maxlen=_LAST_STEPS)
        self._reported: set[str] = set()

    def add_step(self, statistics: Mapping[str, float]) -> str | None:
        """Add the statistics of a step; return what is wrong and its likely cause, the first time that it is."""
        found = statistics.get(_KL)
        if found is None:
            return None
        before = list(self._before)
        self._before.append(found)
        if len(before) < _FIRST_STEPS:
            return self._report_start(found) if found > _HIGH else None
        if found <= max(_JUMP_FLOOR, _JUMP * median(before)):
            return None
        jump = f"engine and trainer disagree: their KL divergence is {found:.2g} a token, and was {median(before):.2g}"
        turns = [value for name, value in statistics.items() if name.startswith(f"{_KL}_turn_")]
        if len(turns) > 1 and turns[-1] > _LATE_TURNS * turns[0]:
            return self._report(
                "turns",
                f"{jump}. It grows with the turns of a rollout ({turns[0]:.2g} in the first, {turns[-1]:.2g} in the "
                "last): look at what the engine keeps between turns, that is its prefix cache, and at long contexts",
            )
        return self._report(
            "jump",
            f"{jump}. It is alike in all turns: the engine may serve older weights than it reports, or an update was "
            "too large (see `training/kl_proximal_k3`)",
        )

    def _report_start(self, found: float) -> str | None:
        return self._report(
            "start",
            f"engine and trainer disagree from the start: their KL divergence is {found:.2g} a token. They may compute "
            "in different precisions (`engine.dtype`, a quantised engine), or with different weights",
        )

    def _report(self, kind: str, message: str) -> str | None:
        if kind in self._reported:
            return None
        self._reported.add(kind)
        return message
