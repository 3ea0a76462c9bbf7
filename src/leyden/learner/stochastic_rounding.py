"""Rounds float32 weights to bfloat16 so that a change far smaller than the step between two bfloat16 numbers survives.

Rounded to the nearest number, a weight that such a change is added to stays as it is. Here a weight is rounded up with
a probability that grows with its distance from the number below, so that the mean of a change over many weights is
right. The chances of each weight depend on the seed alone: as the change grows, weights move one after another.
"""

import torch
from torch import Tensor

_DROPPED_BITS = 16
"""The bits of a float32 that a bfloat16 does not have."""


def round_to_bfloat16(values: Tensor, seed: int) -> Tensor:
    """Round finite float32 values up or down at random. What a bfloat16 can hold is returned as it is."""
    chances = torch.Generator(values.device).manual_seed(seed)
    below = torch.randint(1 << _DROPPED_BITS, values.shape, generator=chances, device=values.device, dtype=torch.int32)
    bits = values.contiguous().view(torch.int32) + below
    return (bits >> _DROPPED_BITS << _DROPPED_BITS).view(torch.float32).bfloat16()
