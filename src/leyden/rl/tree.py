"""The prefix tree of token sequences: what they share is there once.

Sequences in lexicographic order visit their tree depth first, so a tree is its sequences one after another, each
without what it shares with the one before. A node's descendants lie right behind it: `ends` is where they stop, and
node j is an ancestor of node i, or i itself, if j <= i < ends[j].
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Tokens = Sequence[int] | Ints


class Tree(Struct, frozen=True):
    """Distinct tokens in depth-first order. A token's position is its depth; it attends to its ancestors."""

    ids: Ints
    depths: Ints
    ends: Ints
    paths: tuple[Ints, ...]
    """For each sequence, in the order in which they were given: the node of each of its tokens."""
    kept: tuple[int, ...]
    """How many of those nodes are of sequences before it; the rest, which lie behind each other, are its own."""


def grow(sequences: Sequence[Tokens]) -> Tree:
    """The tree of some sequences."""
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    ids, depths, ends = np.empty((3, sum(map(len, arrays))), dtype=np.int64)
    paths: list[Ints] = [np.empty(0, np.int64)] * len(arrays)
    shared = [0] * len(arrays)
    path, before = np.empty(0, np.int64), np.empty(0, np.int64)
    nodes = 0
    for index in order(arrays):
        array = arrays[index]
        kept = common(before, array)
        ends[path[kept:]] = nodes
        new = np.arange(nodes, nodes + len(array) - kept)
        ids[new], depths[new] = array[kept:], np.arange(kept, len(array))
        path, before, nodes = np.concatenate([path[:kept], new]), array, nodes + len(new)
        paths[index], shared[index] = path, kept
    ends[path] = nodes
    return Tree(ids[:nodes], depths[:nodes], ends[:nodes], tuple(paths), tuple(shared))


def order(sequences: Sequence[Tokens]) -> list[int]:
    """The sequences in lexicographic order, by index: neighbours share the most."""
    keys = [np.asarray(sequence, dtype=">u4").tobytes() for sequence in sequences]  # which compare as the ids do
    return sorted(range(len(sequences)), key=keys.__getitem__)


def common(left: Ints, right: Ints) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length
