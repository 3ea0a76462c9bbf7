"""Triton kernels over the slots of the KV cache: rotary embedding and cache writes, and attention.

Attention reads only the positions that a token sees, whatever the length of the buffer, so a captured CUDA graph stays
valid while sequences grow. `slot_attention` says what the kernels compute.

Triton compiles a kernel, for a second or so, for every kind of its arguments. Arguments that change from step to step
are therefore not specialised: numbers of tokens and splits, and addresses inside a tensor of indices.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS_PER_BLOCK = 64


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])  # type: ignore[untyped-decorator]  # triton has no types
def _store_kernel(  # type: ignore[no-untyped-def]  # Triton reads the arguments
    qkv,
    query,
    cache,
    slots,
    positions,
    cosine,
    sine,
    norms,
    eps,
    qkv_stride,
    slot_stride,
    head_stride,
    position_stride,
    HEADS: tl.constexpr,  # Triton's constants
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    at = tl.arange(0, BLOCK)
    mask = at < HALF
    source = qkv + row * qkv_stride + head * 2 * HALF
    first = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at, mask=mask, other=0.0).to(tl.float32)
    if head < HEADS + KEY_HEADS:
        if NORM:
            scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / (2 * HALF) + eps)
            weight = norms + tl.where(head < HEADS, 0, 2 * HALF)
            first *= scale * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
            second *= scale * tl.load(weight + HALF + at, mask=mask, other=0.0).to(tl.float32)
        cos = tl.load(cosine + position * HALF + at, mask=mask, other=0.0)
        sin = tl.load(sine + position * HALF + at, mask=mask, other=0.0)
        rotated = first * cos - second * sin
        second = second * cos + first * sin
        first = rotated
    if head < HEADS:
        target = query + (row * HEADS + head) * 2 * HALF
        tl.store(target + at, first.to(query.dtype.element_ty), mask=mask)
        tl.store(target + HALF + at, second.to(query.dtype.element_ty), mask=mask)
    else:
        target = cache + slot * slot_stride + (head - HEADS) * head_stride + position * position_stride
        tl.store(target + at, first.to(cache.dtype.element_ty), mask=mask)
        tl.store(target + HALF + at, second.to(cache.dtype.element_ty), mask=mask)


@triton.jit(  # type: ignore[untyped-decorator]  # triton has no types
    do_not_specialize=["rows", "splits"],
    do_not_specialize_on_alignment=["tile_rows", "tile_counts", "tile_slots", "tile_positions"],
)
def _attention_kernel(  # type: ignore[no-untyped-def]  # Triton reads the arguments
    query,
    cache,
    output,
    logsumexp,
    tile_rows,
    tile_counts,
    tile_slots,
    tile_positions,
    scale,
    rows,
    splits,
    slot_stride,
    head_stride,
    position_stride,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, count = tl.load(tile_rows + tile), tl.load(tile_counts + tile)
    slot, position = tl.load(tile_slots + tile), tl.load(tile_positions + tile)
    m, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    token = m // GROUP
    valid = (token < count)[:, None] & (d < SIZE)[None, :]
    heads = (row + token) * (KEY_HEADS * GROUP) + head * GROUP + m % GROUP
    q = tl.load(query + heads[:, None] * SIZE + d[None, :], mask=valid, other=0.0)
    end = position + count
    share = tl.cdiv(tl.cdiv(end, splits), BLOCK_N) * BLOCK_N
    begin = split * share
    stop = tl.minimum(begin + share, end)
    keys = cache + slot * slot_stride + head * head_stride
    values = keys + KEY_HEADS * head_stride
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(begin, stop, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        live = (n < stop)[:, None] & (d < SIZE)[None, :]
        at = n[:, None] * position_stride + d[None, :]
        k = tl.load(keys + at, mask=live, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (n[None, :] <= (position + token)[:, None]) & (n < stop)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see none of these keys
        shares = tl.exp(scores - base[:, None])
        decay = tl.exp(highest - base)
        total = total * decay + tl.sum(shares, 1)
        v = tl.load(values + at, mask=live, other=0.0)
        sums = sums * decay[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        highest = higher
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    split_heads = split * rows * KEY_HEADS * GROUP + heads
    tl.store(output + split_heads[:, None] * SIZE + d[None, :], sums.to(output.dtype.element_ty), mask=valid)
    if splits > 1:
        tl.store(logsumexp + split_heads, highest + tl.log(total), mask=token < count)


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
    """Compute what `slot_attention.store` says."""
    key_heads, size = cache.shape[1] // 2, cache.shape[3]
    heads = qkv.shape[1] // size - 2 * key_heads
    query = torch.empty((len(qkv), heads, size), dtype=qkv.dtype, device=qkv.device)
    _store_kernel[(len(qkv), heads + 2 * key_heads)](
        qkv,
        query,
        cache,
        slots,
        positions,
        cosine,
        sine,
        qkv if norms is None else norms,
        eps,
        qkv.stride(0),
        *cache.stride()[:3],
        HEADS=heads,
        KEY_HEADS=key_heads,
        HALF=size // 2,
        BLOCK=triton.next_power_of_2(size // 2),
        NORM=norms is not None,
    )
    return query


def attend(query: Tensor, cache: Tensor, tiles: Tensor, tile_tokens: int, splits: int) -> Tensor:
    """Compute what `slot_attention.attend` says; `splits` programs share the keys of each tile."""
    rows, heads, size = query.shape
    key_heads = cache.shape[1] // 2
    group = heads // key_heads
    parts = torch.empty(
        (splits, rows, heads, size), dtype=query.dtype if splits == 1 else torch.float32, device=query.device
    )
    logsumexp = torch.empty((splits, rows, heads), dtype=torch.float32, device=query.device)
    _attention_kernel[(tiles.shape[1], key_heads, splits)](
        query,
        cache,
        parts,
        logsumexp,
        *tiles.unbind(),
        size**-0.5,
        rows,
        splits,
        *cache.stride()[:3],
        KEY_HEADS=key_heads,
        GROUP=group,
        SIZE=size,
        BLOCK_M=max(16, triton.next_power_of_2(tile_tokens * group)),
        BLOCK_N=KEYS_PER_BLOCK,
        BLOCK_D=max(16, triton.next_power_of_2(size)),
    )
    if splits == 1:
        return parts[0].flatten(1)
    return (parts * logsumexp.softmax(0)[..., None]).sum(0).to(query.dtype).flatten(1)
