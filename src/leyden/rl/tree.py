"""The prefix tree of token sequences: what they share is there once.

Sequences in lexicographic order visit their tree depth first, so a tree is its sequences one after another, each
without what it shares with the one before. A node's descendants lie right behind it: `ends` is where they stop, and
node j is an ancestor of node i, or i itself, if j <= i < ends[j].
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Tree(Struct, frozen=True):
    """Distinct tokens in depth-first order. A token's position is its depth; it attends to its ancestors."""

    ids: Ints
    depths: Ints
    ends: Ints
    paths: tuple[Ints, ...]
    """For each sequence, in the order in which they were given: the node of each of its tokens."""


def grow(sequences: Sequence[Sequence[int]]) -> Tree:
    """The tree of some sequences."""
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    paths: list[Ints] = [np.empty(0, np.int64)] * len(arrays)
    pieces: list[Ints] = []
    depths: list[Ints] = []
    ends: list[int] = []
    path, before = np.empty(0, np.int64), np.empty(0, np.int64)
    for index in order(sequences):
        array = arrays[index]
        kept = common(before, array)
        for node in path[kept:]:
            ends[node] = len(ends)
        new = np.arange(len(ends), len(ends) + len(array) - kept)
        ends.extend([-1] * len(new))
        pieces.append(array[kept:])
        depths.append(np.arange(kept, len(array)))
        path, before = np.concatenate([path[:kept], new]), array
        paths[index] = path
    for node in path:
        ends[node] = len(ends)
    return Tree(_joined(pieces), _joined(depths), np.asarray(ends, dtype=np.int64), tuple(paths))


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts])


def order(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The sequences in lexicographic order, by index: neighbours share the most."""
    return sorted(range(len(sequences)), key=lambda index: (tuple(sequences[index]), index))


def common(left: Ints, right: Ints) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length


def divide(sequences: Sequence[Sequence[int]], most: int, square: float) -> Iterator[list[int]]:
    """Sequences in groups whose trees have at most so many tokens, cut where the least is shared.

    A tree of n tokens costs n + n^2 / square: it is cut too where its parts, which repeat what they share, cost less. A
    sequence longer than `most` is a group of its own.
    """
    if not sequences:
        return
    sorted_ = order(sequences)
    arrays = [np.asarray(sequences[index], dtype=np.int64) for index in sorted_]
    shared = [0, *(common(left, right) for left, right in pairwise(arrays))]
    own = [len(array) - kept for array, kept in zip(arrays, shared, strict=True)]

    def cost(start: int, end: int) -> float:
        size = sum(own[start:end]) + shared[start]
        return size + size**2 / square if size <= most else inf

    def cut(start: int, end: int) -> Iterator[list[int]]:
        if end - start > 1:
            middle = (start + end) / 2
            at = min(range(start + 1, end), key=lambda place: (shared[place], abs(place - middle)))
            whole = cost(start, end)
            if whole == inf or cost(start, at) + cost(at, end) < whole:
                yield from cut(start, at)
                yield from cut(at, end)
                return
        yield sorted_[start:end]

    yield from cut(0, len(arrays))
