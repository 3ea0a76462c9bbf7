"""The loss of the critic: its squared error."""

from torch import Tensor


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """L = (V - target)^2 / 2 for each state; the target is the credit's value of the call in it."""
    return 0.5 * (values - targets) ** 2
