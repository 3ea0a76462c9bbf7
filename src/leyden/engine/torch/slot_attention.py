"""Attention of many requests at once over their slots of the KV cache: Triton kernels on CUDA, torch elsewhere.

A *tile* is a few neighbouring tokens of one request. The tiles of a step are a tensor of [4, tile]: the row of the
first token, the number of tokens, the slot, and the position of the first token.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # torch's convention
from torch import Tensor

from leyden.engine.torch.forward import Segment

PREFILL_ROWS = 64
"""Queries of a tile of several tokens: a token has one for each head that shares a key."""
MIN_PROGRAMS, MAX_SPLITS = 264, 16
"""With few requests the keys of each are split, so that every multiprocessor of a large GPU has work."""


def tile_segments(segments: Sequence[Segment], tile_tokens: int) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """Cut segments, whose tokens are rows one after another, into tiles of at most `tile_tokens` tokens."""
    tiles, row = [], 0
    for segment in segments:
        length = len(segment.ids)
        for at in range(0, length, tile_tokens):
            tiles.append((row + at, min(tile_tokens, length - at), segment.slot, segment.start + at))
        row += length
    return np.ascontiguousarray(np.array(tiles, np.int64).T)


def store(
    qkv: Tensor,
    cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    cosine: Tensor,
    sine: Tensor,
    norms: Tensor | None,
    eps: float,
) -> Tensor:
    """Rotate queries and keys of [token, heads * size], write keys and values to the cache, and return the queries.

    The cache is [slot, key heads then value heads, position, size]; `norms` are the weights of the query's and the
    key's RMS norms, for models that have them.
    """
    if qkv.device.type == "cuda":
        from leyden.engine.torch import kernels  # Triton comes with torch for CUDA only

        return kernels.store(qkv, cache, slots, positions, cosine, sine, norms, eps)
    key_heads, size = cache.shape[1] // 2, cache.shape[3]
    parts = qkv.view(len(qkv), -1, size).to(cosine.dtype)
    queries, keys, values = parts.split((parts.shape[1] - 2 * key_heads, key_heads, key_heads), 1)
    if norms is not None:
        query_norm, key_norm = norms.to(cosine.dtype)
        queries = F.rms_norm(queries, (size,), query_norm, eps)
        keys = F.rms_norm(keys, (size,), key_norm, eps)
    cos, sin = cosine[positions][:, None], sine[positions][:, None]
    queries, keys = (_rotate(one, cos, sin).to(qkv.dtype) for one in (queries, keys))
    cache[slots, :, positions] = torch.cat((keys, values.to(qkv.dtype)), 1)
    return queries


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


def attend(query: Tensor, cache: Tensor, tiles: Tensor, tile_tokens: int) -> Tensor:
    """Return the attention of queries [token, head, size] over their slots, up to each token's position, as rows."""
    key_heads = cache.shape[1] // 2
    if query.device.type == "cuda":
        from leyden.engine.torch import kernels

        splits = min(max(MIN_PROGRAMS // (tiles.shape[1] * key_heads), 1), MAX_SPLITS)
        return kernels.attend(query, cache, tiles, tile_tokens, splits)
    row, count, slot, position = tiles
    size, tokens = query.shape[2], torch.arange(tile_tokens)
    valid = tokens < count[:, None]
    rows = (row[:, None] + tokens).clamp(max=len(query) - 1)
    queries = query[rows].view(len(row), tile_tokens, key_heads, -1, size).permute(0, 2, 3, 1, 4)
    live = cache[slot, :, : int((position + count).max())]
    keys, values = (part[:, :, None].expand(-1, -1, queries.shape[2], -1, -1) for part in live.chunk(2, 1))
    seen = torch.arange(live.shape[2]) <= (position[:, None] + tokens)[:, :, None]
    attended = F.scaled_dot_product_attention(queries, keys, values, seen[:, None, None])
    output = torch.empty_like(query)
    output[rows[valid]] = attended.permute(0, 3, 1, 2, 4).flatten(2, 3)[valid]
    return output.flatten(1)
