"""Keys and values of every slot, in memory that grows with the longest sequence and is real only where written."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

FIRST = 256
"""Positions that a row begins with; it doubles from there."""


class KVCache:
    """Planes of [slot, head, position, size], one or two a layer, all of the same length.

    What was never written is zero, and so harmless under a mask: a probability of nought times anything finite.
    """

    def __init__(self, slots: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.context = slots, context
        self.dtype, self.device = dtype, device
        self.length = min(FIRST, context)
        self.planes: list[Tensor] = []

    def plane(self, index: int, heads: int, size: int) -> Tensor:
        """One plane; the first to ask for it, in order, makes it."""
        if index == len(self.planes):
            self.planes.append(self._zeros(heads, size))
        return self.planes[index]

    def reserve(self, length: int, used: Sequence[int]) -> None:
        """Make every row hold so many positions; of each row so many are in use and kept."""
        if length <= self.length:
            return
        while self.length < length:
            self.length = min(2 * self.length, self.context)
        for index, old in enumerate(self.planes):
            new = self._zeros(old.shape[1], old.shape[3])
            for row, kept in enumerate(used):
                new[row, :, :kept] = old[row, :, :kept]
            self.planes[index] = new

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the beginning of one row to another."""
        for plane in self.planes:
            plane[target, :, :length] = plane[source, :, :length]

    def wipe(self, row: int) -> None:
        """Forget what is not a number: no mask hides it."""
        for plane in self.planes:
            plane[row].zero_()

    def _zeros(self, heads: int, size: int) -> Tensor:
        shape = (self.slots, heads, self.length, size)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # calloc's pages cost nothing until they are written; torch.zeros would write them all
        count = self.slots * heads * self.length * size * self.dtype.itemsize
        return torch.from_numpy(np.zeros(count, np.uint8)).view(self.dtype).view(shape)
