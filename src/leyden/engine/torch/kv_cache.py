"""The KV cache of all slots. It grows with the longest sequence; on a CPU, memory is used only where it is written."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

INITIAL_LENGTH = 256
"""Positions per slot at first; doubled when needed."""


class KVCache:
    """Buffers of [slot, head, position, size], one or two per layer, each with at least `length` positions.

    Positions that were never written are zero, so a masked read is harmless: probability 0 times a finite value.
    """

    def __init__(self, slots: int, context_length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.context_length = slots, context_length
        self.dtype, self.device = dtype, device
        self.length = min(INITIAL_LENGTH, context_length)
        self.buffers: list[Tensor] = []
        self.moves = 0
        """How often buffers may have moved: captured CUDA graphs hold their addresses."""

    def buffer(self, index: int, heads: int, size: int) -> Tensor:
        """Return the buffer with this index, allocated on first use; first uses come in order of index."""
        if index == len(self.buffers):
            self.buffers.append(self._zeros(heads, size, self.length))
        return self.buffers[index]

    def reserve(self, length: int, computed: Sequence[int]) -> None:
        """Make room for `length` positions in every slot; keeps the first `computed` positions of each slot."""
        if length <= self.length:
            return
        longer = self.length
        while longer < length:
            longer = min(2 * longer, self.context_length)
        self.moves += 1
        for index, old in enumerate(self.buffers):
            if old.shape[2] < longer:  # an earlier call may have failed for lack of memory after some of the buffers
                self.buffers[index] = self._lengthened(old, longer, computed)
        self.length = longer

    def _lengthened(self, old: Tensor, length: int, computed: Sequence[int]) -> Tensor:
        new = self._zeros(old.shape[1], old.shape[3], length)
        if self.device.type == "cpu":
            for slot, count in enumerate(computed):
                new[slot, :, :count] = old[slot, :, :count]
        else:  # one copy costs less than many small ones
            new[:, :, : old.shape[2]] = old
        return new

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for buffer in self.buffers:
            buffer[target, :, :length] = buffer[source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot that may hold NaN or infinity, which no mask hides."""
        for buffer in self.buffers:
            buffer[slot].zero_()

    def _zeros(self, heads: int, size: int, length: int) -> Tensor:
        shape = (self.slots, heads, length, size)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # np.zeros uses calloc, whose pages cost nothing until they are written; torch.zeros would write them all
        count = self.slots * heads * length * size * self.dtype.itemsize
        return torch.from_numpy(np.zeros(count, np.uint8)).view(self.dtype).view(shape)
