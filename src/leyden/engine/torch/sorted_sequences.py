"""Finds the sequences with the longest common prefix: in sorted order they are the neighbours of the one asked for."""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

COMPARE_BLOCK = 256
"""Elements compared first when looking for a common prefix; then twice as many, and so on."""


class SortedSequences:
    """Token sequences, each under the number of its slot."""

    def __init__(self) -> None:
        self._sorted: list[tuple[bytes, int]] = []
        self._sequences: dict[int, bytes] = {}

    def set(self, slot: int, tokens: "array[int]") -> None:
        """Replace the sequence of a slot; an empty one removes it. Later changes of `tokens` are not seen."""
        old = self._sequences.pop(slot, None)
        if old is not None:
            del self._sorted[bisect_left(self._sorted, (old, slot))]
        if tokens:
            self._sequences[slot] = tokens.tobytes()
            insort(self._sorted, (self._sequences[slot], slot))

    def nearest(self, tokens: "array[int]") -> Iterator[tuple[int, int]]:
        """Yield slots and how many tokens their sequences share with this one: the longest first, and none without."""
        wanted = tokens.tobytes()

        def shared(position: int) -> int:
            if not 0 <= position < len(self._sorted):
                return 0
            return common_prefix_length(self._sorted[position][0], wanted, len(wanted)) // tokens.itemsize

        right = bisect_left(self._sorted, (wanted, -1))
        left = right - 1
        before, after = shared(left), shared(right)
        while before or after:
            if before >= after:
                yield self._sorted[left][1], before
                left -= 1
                before = shared(left)
            else:
                yield self._sorted[right][1], after
                right += 1
                after = shared(right)


def common_prefix_length(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Return the length of the common prefix of two sequences, at most `limit`."""
    limit = min(limit, len(one), len(other))
    if limit <= 0 or one[0] != other[0]:
        return 0
    equal, size = 0, COMPARE_BLOCK
    while equal < limit and one[equal : min(equal + size, limit)] == other[equal : min(equal + size, limit)]:
        equal, size = equal + size, 2 * size
    if equal >= limit:
        return limit
    differ = min(equal + size, limit)  # the first difference is before this
    while differ - equal > 1:
        middle = (equal + differ) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            differ = middle
    return equal
