"""Estimates of KL(current || reference) from tokens that the current policy sampled, one for each token.

With d = log p_current - log p_reference, all three have about the same value. As a penalty on the reward, k1 is
unbiased. In a loss, the gradient of k2 is that of the KL; the gradient of k1 is 0 in expectation, and that of k3 is the
gradient of the KL in the other direction.
"""

from collections.abc import Callable

from torch import Tensor

from leyden.rl.ratio import ratio


def k1(current: Tensor, reference: Tensor) -> Tensor:
    """d: unbiased, of either sign."""
    return current - reference


def k2(current: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2: never negative, biased if the policies are far apart."""
    return 0.5 * (current - reference) ** 2


def k3(current: Tensor, reference: Tensor) -> Tensor:
    """e^-d - 1 + d: never negative and unbiased."""
    gap = reference - current
    return ratio(gap) - 1 - gap


Estimate = Callable[[Tensor, Tensor], Tensor]
ESTIMATES: dict[str, Estimate] = {"k1": k1, "k2": k2, "k3": k3}
