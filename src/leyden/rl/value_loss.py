"""What a critic is taught by: the square of how far it was off."""

from torch import Tensor


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """L = (V - target)^2 / 2 for each state; the target is the value that the credit gave to the call in it."""
    return 0.5 * (values - targets) ** 2
