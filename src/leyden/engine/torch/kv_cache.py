"""The KV cache of all slots. It grows with the longest sequence; on a CPU, memory is used only where it is written."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from leyden.engine.torch.transfer import to_device

INITIAL_LENGTH = 256
"""Positions per slot at first; doubled when needed."""
COPIED_TOGETHER = 65_536
"""Positions of all copies that a GPU makes at once, which limits the memory for it."""

Copies = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""[copy, (source, target, length)]."""


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
        self._copies: dict[int, tuple[int, int]] = {}
        """For each slot that `finish_copies` has to write: the slot to copy from, and the number of positions."""
        self._sources: set[int] = set()

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
        """Copy the first `length` positions of one slot to another, at the next `finish_copies`."""
        if target in self._sources:  # its contents are still to be copied
            self.finish_copies()
        source, _ = self._copies.get(source, (source, 0))
        self._copies[target] = source, length
        self._sources.add(source)

    def finish_copies(self) -> None:
        """Make the copies that were asked for; must come before anything else is written."""
        copies = np.array([(source, target, length) for target, (source, length) in self._copies.items()])
        self.forget_copies()
        if len(copies):
            copy = self._copy_in_turn if self.device.type == "cpu" else self._copy_together
            copy(copies)

    def forget_copies(self) -> None:
        """Do not make the copies that were asked for, because nobody needs the contents any more."""
        self._copies.clear()
        self._sources.clear()

    def _copy_in_turn(self, copies: Copies) -> None:
        for source, target, length in copies.tolist():
            for buffer in self.buffers:
                buffer[target, :, :length] = buffer[source, :, :length]

    def _copy_together(self, copies: Copies) -> None:
        """Copy by index: on a GPU a few operations cost less than many small ones."""
        lengths = copies[:, 2]
        positions = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        rows = np.stack((*np.repeat(copies[:, :2], lengths, 0).T, positions))
        for first in range(0, rows.shape[1], COPIED_TOGETHER):
            source, target, position = to_device(rows[:, first : first + COPIED_TOGETHER].copy(), self.device)
            for buffer in self.buffers:
                buffer[target, :, position] = buffer[source, :, position]

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
