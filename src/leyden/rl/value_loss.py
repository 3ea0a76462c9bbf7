"""The loss of the critic: its squared error, optionally clipped as in PPO."""

import torch
from torch import Tensor


def value_loss(values: Tensor, targets: Tensor, old_values: Tensor, clip: float | None = None) -> Tensor:
    """L = (V - target)^2 / 2 for each state; the target is the credit's value of the call in it.

    With a clip, L is at least that of V moved to within `clip` of the old value, so that moving further gains nothing.
    """
    losses = 0.5 * (values - targets) ** 2
    if clip is None:
        return losses
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(losses, 0.5 * (near - targets) ** 2)
