"""Attention over a prefix tree on a CPU: the tokens that a sample adds to the tree attend to the sample's path.

Every token of the tree is added by exactly one sample, and it attends only to ancestors, which are on that sample's
path. So keys are gathered by path, and apart from padding no masked pair of tokens is computed. Samples that add a
similar number of tokens are computed together.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from leyden.rl.tree import Ints


class PathBatch(Struct, frozen=True):
    """Samples that are computed together."""

    queries: Tensor
    """The nodes that each sample adds, padded and flattened."""
    keys: Tensor
    """The nodes of each sample's path, padded and flattened."""
    shape: tuple[int, int, int]
    """Samples, queries per sample, keys per sample."""
    mask: Tensor
    """[samples, 1, queries, keys]: whether the query attends to the key."""


class PathMask(Tensor):
    """An attention mask that holds paths. It has four dimensions, because models pass such a mask on unchanged."""

    batches: list[PathBatch]
    query_indices: Tensor
    """For every node, its index among the queries of all batches."""

    @classmethod
    def of(cls, paths: Sequence[Ints], kept: Sequence[int], width: int, window: int | None) -> "PathMask":
        """Build the mask of samples with these paths, of which the first `kept` nodes are shared with earlier samples.

        `width` is the number of nodes with padding; `window` is the sliding window of the layer, if it has one.
        """
        by_size: dict[int, list[int]] = defaultdict(list)
        for sample, path in enumerate(paths):
            if added := len(path) - kept[sample]:
                by_size[added.bit_length()].append(sample)
        mask = torch.empty(1, 1, 1, 1).as_subclass(cls)
        mask.batches = []
        query_indices, offset = np.zeros(width, dtype=np.int64), 0
        for samples in by_size.values():
            max_keys = max(len(paths[sample]) for sample in samples)
            max_queries = max(len(paths[sample]) - kept[sample] for sample in samples)
            queries = np.zeros((len(samples), max_queries), dtype=np.int64)
            keys = np.zeros((len(samples), max_keys), dtype=np.int64)
            for row, sample in enumerate(samples):
                path, added_nodes = paths[sample], paths[sample][kept[sample] :]
                keys[row, : len(path)], queries[row, : len(added_nodes)] = path, added_nodes
                query_indices[added_nodes] = offset + row * max_queries + np.arange(len(added_nodes))
            first_depth = torch.tensor([kept[sample] for sample in samples])[:, None, None]
            query_depth = first_depth + torch.arange(max_queries)[None, :, None]
            key_depth = torch.arange(max_keys)[None, None, :]
            attends = key_depth <= query_depth
            if window is not None:
                attends &= key_depth > query_depth - window
            shape = (len(samples), max_queries, max_keys)
            flat = torch.from_numpy(queries.reshape(-1)), torch.from_numpy(keys.reshape(-1))
            mask.batches.append(PathBatch(*flat, shape, attends[:, None]))
            offset += len(samples) * max_queries
        mask.query_indices = torch.from_numpy(query_indices)
        return mask


def path_attention(query: Tensor, key: Tensor, value: Tensor, mask: PathMask, scaling: float | None) -> Tensor:
    """Compute attention: [1, heads, tokens, size] to [1, tokens, heads, size]."""
    query_N, key_N, value_N = (each[0].transpose(0, 1) for each in (query, key, value))
    grouped_queries = query.shape[1] != key.shape[1]
    outputs = []
    for batch in mask.batches:
        samples, queries, keys = batch.shape
        batch_queries = query_N.index_select(0, batch.queries).unflatten(0, (samples, queries)).transpose(1, 2)
        batch_keys, batch_values = (
            each.index_select(0, batch.keys).unflatten(0, (samples, keys)).transpose(1, 2) for each in (key_N, value_N)
        )
        output = scaled_dot_product_attention(
            batch_queries, batch_keys, batch_values, attn_mask=batch.mask, scale=scaling, enable_gqa=grouped_queries
        )
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, mask.query_indices)[None]
