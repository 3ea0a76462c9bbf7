"""Builds the prefix tree of token sequences: each shared prefix is stored once.

Sequences in lexicographic order visit their tree depth first, so the nodes are the sequences one after another, each
without the prefix that it shares with its predecessor. The descendants of node j follow it up to `ends[j]`: node j is
an ancestor of node i, or i itself, if j <= i < ends[j].
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
    """For each sequence, in the given order: the node of each of its tokens."""
    kept: tuple[int, ...]
    """How many of those nodes belong to earlier sequences; the rest are consecutive and its own."""


def build_tree(sequences: Sequence[Tokens]) -> Tree:
    """Build the tree of some sequences."""
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    ids, depths, ends = np.empty((3, sum(map(len, arrays))), dtype=np.int64)
    paths: list[Ints] = [np.empty(0, np.int64)] * len(arrays)
    shared = [0] * len(arrays)
    path, previous = np.empty(0, np.int64), np.empty(0, np.int64)
    nodes = 0
    for index in lexicographic_order(arrays):
        array = arrays[index]
        kept = common_prefix(previous, array)
        ends[path[kept:]] = nodes
        new = np.arange(nodes, nodes + len(array) - kept)
        ids[new], depths[new] = array[kept:], np.arange(kept, len(array))
        path, previous, nodes = np.concatenate([path[:kept], new]), array, nodes + len(new)
        paths[index], shared[index] = path, kept
    ends[path] = nodes
    return Tree(ids[:nodes], depths[:nodes], ends[:nodes], tuple(paths), tuple(shared))


def lexicographic_order(sequences: Sequence[Tokens]) -> list[int]:
    """Sort sequences lexicographically, by index: neighbours share the longest prefixes."""
    keys = [np.asarray(sequence, dtype=">u4").tobytes() for sequence in sequences]  # compare as the ids do
    return sorted(range(len(sequences)), key=keys.__getitem__)


def common_prefix(left: Ints, right: Ints) -> int:
    """Return the length of the longest common prefix of two sequences."""
    length = min(len(left), len(right))
    differ = np.flatnonzero(left[:length] != right[:length])
    return int(differ[0]) if len(differ) else length
