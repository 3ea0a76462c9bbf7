"""Attention along paths: the tokens that a row adds to a tree attend to the row's whole path, and to nothing else.

Every token of a tree is some row's own, and a row's own tokens see only what its path has: so keys are gathered by
path, and no pair of tokens is computed of which one does not see the other, padding apart. Rows that add about as much
are computed together.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from leyden.rl.tree import Ints


class PathRows(Struct, frozen=True):
    """Rows that are computed together."""

    queries: Tensor
    """The nodes that each adds, one row after another, padded."""
    keys: Tensor
    """The nodes of each path, likewise."""
    shape: tuple[int, int, int]
    """Rows, queries of each, keys of each."""
    mask: Tensor
    """[rows, 1, queries, keys]: who sees whom."""


class Paths(Tensor):
    """A mask in the form of paths. Models pass a mask of four dimensions on as it is, and so this has four."""

    batches: list[PathRows]
    places: Tensor
    """Of every node: where among the queries of all batches it is."""

    @classmethod
    def of(cls, paths: Sequence[Ints], kept: Sequence[int], width: int, window: int | None) -> "Paths":
        """The mask of trees of which each row has a path and keeps so many of its nodes of others."""
        alike: dict[int, list[int]] = defaultdict(list)
        for row, path in enumerate(paths):
            if adds := len(path) - kept[row]:
                alike[adds.bit_length()].append(row)
        mask = torch.empty(1, 1, 1, 1).as_subclass(cls)
        mask.batches = []
        places, done = np.zeros(width, dtype=np.int64), 0
        for rows in alike.values():
            longest, most = max(len(paths[row]) for row in rows), max(len(paths[row]) - kept[row] for row in rows)
            queries, keys = np.zeros((len(rows), most), dtype=np.int64), np.zeros((len(rows), longest), dtype=np.int64)
            for line, row in enumerate(rows):
                path, own = paths[row], paths[row][kept[row] :]
                keys[line, : len(path)], queries[line, : len(own)] = path, own
                places[own] = done + line * most + np.arange(len(own))
            depth = torch.tensor([kept[row] for row in rows])[:, None, None] + torch.arange(most)[None, :, None]
            seen = torch.arange(longest)[None, None, :] <= depth
            if window is not None:
                seen &= torch.arange(longest)[None, None, :] > depth - window
            shape = (len(rows), most, longest)
            flat = torch.from_numpy(queries.reshape(-1)), torch.from_numpy(keys.reshape(-1))
            mask.batches.append(PathRows(*flat, shape, seen[:, None]))
            done += len(rows) * most
        mask.places = torch.from_numpy(places)
        return mask


def path_attention(query: Tensor, key: Tensor, value: Tensor, mask: Paths, scaling: float | None) -> Tensor:
    """[1, heads, tokens, size] to [1, tokens, heads, size]."""
    query_N, key_N, value_N = (each[0].transpose(0, 1) for each in (query, key, value))
    found = []
    for rows in mask.batches:
        number, queries, keys = rows.shape
        some = query_N.index_select(0, rows.queries).unflatten(0, (number, queries)).transpose(1, 2)
        seen_keys, seen_values = (
            each.index_select(0, rows.keys).unflatten(0, (number, keys)).transpose(1, 2) for each in (key_N, value_N)
        )
        shared = query.shape[1] != key.shape[1]
        seen = scaled_dot_product_attention(
            some, seen_keys, seen_values, attn_mask=rows.mask, scale=scaling, enable_gqa=shared
        )
        found.append(seen.transpose(1, 2).flatten(0, 1))
    return torch.cat(found).index_select(0, mask.places)[None]
