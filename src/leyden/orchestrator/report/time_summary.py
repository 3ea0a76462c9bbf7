"""Summarises where the time of a run's steps went, in one line for the end of a run."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

_SAMPLING = "time/sampling/"
_PHASES = ("sampling", "training", "waiting", "publishing", "evaluation")


def time_summary(lines: Sequence[dict[str, Any]]) -> str:
    """Return the mean seconds of each phase of a step, and the shares of sampling; empty if there was no step."""
    steps = [line for line in lines if "time/sampling_s" in line]
    if not steps:
        return ""
    phases_of_a_step = _PHASES[:-1] if "time/waiting_s" in steps[-1] else _PHASES  # an evaluation beside the next step
    mean = {phase: fmean(line.get(f"time/{phase}_s", 0.0) for line in steps) for phase in phases_of_a_step}
    names = dict.fromkeys(name for line in steps for name in line if name.startswith(_SAMPLING))
    split = {name: fmean(line.get(name, 0.0) for line in steps) for name in names}
    whole = sum(split.values()) or 1.0
    shares = ", ".join(
        f"{name.removeprefix(_SAMPLING).removesuffix('_s')} {seconds / whole:.0%}"
        for name, seconds in sorted(split.items(), key=lambda item: -item[1])
    )
    phases = [f"{phase} {seconds:.2f} s" for phase, seconds in mean.items() if seconds > 0]
    if shares and mean["sampling"] > 0:
        phases[0] += f" ({shares})"
    return f"a step took {sum(mean.values()):.2f} s: {', '.join(phases)}"
