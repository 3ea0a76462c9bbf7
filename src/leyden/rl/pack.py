"""Which sequences are computed together: in trees of at most so many tokens, at the least cost, or as plain lines.

In lexicographic order neighbours share the most, so a part is a run of that order. A cut costs what both of its sides
begin with, which is then computed twice; of all the ways to cut, the cheapest is taken. A sequence that another begins
with lies in the other's line; where little more than that is shared, lines are cheaper than trees.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from leyden.rl.tree import Tokens, common, order


class Cost(Struct, frozen=True):
    """What trees cost, in tokens of a plain line."""

    most: int
    """No part has more tokens, unless a single sequence has."""
    part: float = 0.0
    """What a part costs beside its tokens."""
    tree: float = 1.0
    """What a token costs in a tree, where one in a line costs 1."""
    block: int = 1
    """Trees are padded to a multiple of so many tokens."""


class Part(NamedTuple):
    """Some sequences in one tree."""

    indices: list[int]
    tokens: int
    """Distinct ones."""


def lines(sequences: Sequence[Tokens]) -> list[list[int]]:
    """The sequences by the line in which they lie, by index: the first of each is the whole line."""
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    found: list[list[int]] = []
    for index in reversed(order(arrays)):  # what begins with a sequence comes right after it in order
        if found and common(arrays[index], arrays[found[-1][0]]) == len(arrays[index]):
            found[-1].append(index)
        else:
            found.append([index])
    return found


def pack(sequences: Sequence[Tokens], cost: Cost) -> list[Part]:
    """The sequences in parts, by index, in lexicographic order."""
    if not sequences:
        return []
    whole = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    ordered = order(whole)
    arrays = [whole[index] for index in ordered]
    shared = np.array([0, *(common(left, right) for left, right in pairwise(arrays))])
    ends = np.cumsum([len(array) for array in arrays] - shared)  # tokens of the whole tree up to each sequence
    opens = ends - [len(array) for array in arrays]  # a part from i to j has ends[j] - opens[i] tokens
    cheapest = np.zeros(len(arrays) + 1)  # of everything before a sequence
    starts = np.zeros(len(arrays), dtype=np.int64)  # of the last part, where a sequence is its last
    for last in range(len(arrays)):
        first = min(int(np.searchsorted(ends, ends[last] - cost.most)), last)
        sizes = ends[last] - opens[first : last + 1]
        costs = cheapest[first : last + 1] + cost.part + sizes
        costs[:-1][sizes[:-1] > cost.most] = np.inf
        best = int(np.argmin(costs))
        starts[last], cheapest[last + 1] = first + best, costs[best]
    parts = []
    end = len(arrays)
    while end:
        start = int(starts[end - 1])
        parts.append(Part(ordered[start:end], int(ends[end - 1] - opens[start])))
        end = start
    return parts[::-1]
