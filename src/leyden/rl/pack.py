"""Packs sequences into prefix trees of bounded size at the least cost.

In lexicographic order neighbours share the longest prefixes, so a tree holds consecutive sequences of that order. A cut
between two trees costs the prefix that both sides share, which is computed twice; dynamic programming finds the
cheapest cuts. `merge_prefixes` is the alternative to trees: a sequence that is a prefix of another is computed with it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from leyden.rl.tree import Tokens, common_prefix, lexicographic_order


class Cost(Struct, frozen=True):
    """The cost of trees, in tokens of a plain sequence."""

    max_tokens: int
    """Tokens of a tree, unless a single sequence has more."""
    overhead: float = 0.0
    """The fixed cost of a tree."""
    tree_token: float = 1.0
    """The cost of a token in a tree; one in a plain sequence costs 1."""
    block: int = 1
    """Trees are padded to a multiple of so many tokens."""


class Part(NamedTuple):
    """The sequences of one tree, by index."""

    indices: list[int]
    tokens: int
    """Distinct tokens."""


def merge_prefixes(sequences: Sequence[Tokens]) -> list[list[int]]:
    """Group sequences so that each group's first contains the others as prefixes; by index."""
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    found: list[list[int]] = []
    for index in reversed(lexicographic_order(arrays)):  # a sequence comes right before those that it is a prefix of
        if found and common_prefix(arrays[index], arrays[found[-1][0]]) == len(arrays[index]):
            found[-1].append(index)
        else:
            found.append([index])
    return found


def pack(sequences: Sequence[Tokens], cost: Cost) -> list[Part]:
    """Divide the sequences into trees at the least cost, in lexicographic order."""
    if not sequences:
        return []
    whole = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    ordered = lexicographic_order(whole)
    arrays = [whole[index] for index in ordered]
    shared = np.array([0, *(common_prefix(left, right) for left, right in pairwise(arrays))])
    ends = np.cumsum([len(array) for array in arrays] - shared)  # tokens of one tree of all sequences up to each
    opens = ends - [len(array) for array in arrays]  # a tree of sequences i to j has ends[j] - opens[i] tokens
    cheapest = np.zeros(len(arrays) + 1)  # cost of all sequences before each
    starts = np.zeros(len(arrays), dtype=np.int64)  # first sequence of the tree that ends with each
    for last in range(len(arrays)):
        first = min(int(np.searchsorted(ends, ends[last] - cost.max_tokens)), last)
        sizes = ends[last] - opens[first : last + 1]
        costs = cheapest[first : last + 1] + cost.overhead + sizes
        costs[:-1][sizes[:-1] > cost.max_tokens] = np.inf
        best = int(np.argmin(costs))
        starts[last], cheapest[last + 1] = first + best, costs[best]
    parts = []
    end = len(arrays)
    while end:
        start = int(starts[end - 1])
        parts.append(Part(ordered[start:end], int(ends[end - 1] - opens[start])))
        end = start
    return parts[::-1]
