"""How the learning rate goes over a run."""

from math import cos, pi

from leyden.config import TrainingConfig


def factor(config: TrainingConfig, update: int) -> float:
    """What the learning rate is multiplied by at an update: a linear warm-up, then as the schedule says."""
    updates = config.steps * config.updates_per_step
    warmup = config.warmup_steps * config.updates_per_step
    if update < warmup:
        return (update + 1) / (warmup + 1)
    done = min(1.0, (update - warmup) / max(1, updates - warmup))
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return (1 + cos(pi * done)) / 2
