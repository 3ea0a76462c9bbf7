"""The learning rate schedule. It follows the steps of the run, however many updates each has."""

from math import cos, pi

from leyden.config import TrainingConfig


def learning_rate_factor(config: TrainingConfig, step: int) -> float:
    """Return the factor of the learning rate in a step, counted from 1: a linear warm-up, then the schedule."""
    warmup = config.warmup_steps
    if step <= warmup:
        return step / (warmup + 1)
    done = min(1.0, (step - 1 - warmup) / max(1, config.steps - warmup))
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - done
        case "cosine":
            return (1 + cos(pi * done)) / 2
