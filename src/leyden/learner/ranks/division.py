"""Divides the samples of an update over ranks, so that the one with the most to compute has as little as possible.

In lexicographic order neighbours share the longest prefixes, so a rank gets consecutive samples of that order. Its cost
is the tokens that it computes: those that its samples share count once.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from leyden.learner.sample import Sample
from leyden.rl.tree import Ints, common_prefix, lexicographic_order


def divide(samples: Sequence[Sample], ranks: int, trees: bool = True) -> list[list[int]]:
    """Return the samples of each rank, by index; some ranks may have none. Without `trees` nothing is shared."""
    whole = [np.array((*sample.prompt_ids, *sample.completion_ids), dtype=np.int64) for sample in samples]
    order = lexicographic_order(whole)
    lengths = np.array([len(whole[index]) for index in order], dtype=np.int64)
    shared = np.zeros_like(lengths)
    if trees:
        shared[1:] = [common_prefix(whole[left], whole[right]) for left, right in pairwise(order)]
    ends = np.cumsum(lengths - shared)
    opens = ends - lengths  # samples i to j have ends[j] - opens[i] tokens
    low, high = max(lengths, default=0), sum(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(_cut(ends, opens, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    starts = _cut(ends, opens, low)
    parts = [order[start:end] for start, end in pairwise([*starts, len(order)])]
    return parts + [[] for _ in range(ranks - len(parts))]


def _cut(ends: Ints, opens: Ints, limit: int) -> list[int]:
    """Return the starts of parts that have at most `limit` tokens each."""
    starts: list[int] = []
    start = 0
    while start < len(ends):
        starts.append(start)
        start = int(np.searchsorted(ends, limit + opens[start], side="right"))
    return starts
