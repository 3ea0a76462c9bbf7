"""How the learning rate goes over a run: by its steps, however many updates there are in each."""

from math import cos, pi

from leyden.config import TrainingConfig


def factor(config: TrainingConfig, step: int) -> float:
    """What the learning rate is multiplied by in a step, the first being 1: a linear warm-up, then the schedule."""
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
