"""The Triton kernels compute what their torch versions do: on a GPU, or in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="Triton is not installed")

from leyden.engine.torch import kernels, slot_attention
from leyden.engine.torch.forward import Segment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEGMENTS = [
    Segment(0, 70, [1], True),
    Segment(2, 0, [1], True),
    Segment(1, 0, [0] * 9, True),
    Segment(3, 61, [0] * 5, True),
]
SHAPES = [(4, 2, 8, True), (3, 3, 20, False)]
"""Heads, key heads, size of a head, and whether queries and keys are normalised."""

pytestmark = pytest.mark.slow  # the interpreter takes a minute


@pytest.mark.parametrize(("heads", "key_heads", "size", "norm"), SHAPES)
@pytest.mark.parametrize(("tile_tokens", "splits"), [(1, 1), (1, 3), (4, 1)])
def test_kernels_compute_what_torch_does(
    heads: int, key_heads: int, size: int, norm: bool, tile_tokens: int, splits: int
) -> None:
    torch.manual_seed(0)
    slots = torch.tensor([segment.slot for segment in SEGMENTS for _ in segment.ids])
    positions = torch.tensor([at for segment in SEGMENTS for at in range(segment.start, segment.end)])
    cache = torch.randn(5, 2 * key_heads, 100, size)
    qkv = torch.randn(len(slots), (heads + 2 * key_heads) * size)
    angles = torch.randn(100, size // 2)
    norms = torch.randn(2, size) if norm else None
    tiles = torch.from_numpy(slot_attention.tile_segments(SEGMENTS, tile_tokens))
    inputs = slots, positions, angles.cos(), angles.sin(), norms
    written = cache.to(DEVICE, copy=True)
    query = kernels.store(
        qkv.to(DEVICE), written, *(one if one is None else one.to(DEVICE) for one in inputs), eps=1e-6
    )
    found = kernels.attend(query, written, tiles.to(DEVICE), tile_tokens, splits)
    expected_query = slot_attention.store(qkv, cache, *inputs, eps=1e-6)
    torch.testing.assert_close(query.cpu(), expected_query, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(written.cpu(), cache, atol=1e-5, rtol=1e-5)
    expected = slot_attention.attend(expected_query, cache, tiles, tile_tokens)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA device")
def test_other_numbers_of_tokens_and_splits_compile_nothing_new() -> None:
    def compute(tokens: int, splits: int) -> None:
        segments = [Segment(0, 0, [0] * tokens, True)]
        slots, positions = torch.zeros(2, tokens, dtype=torch.long, device=DEVICE)
        angles = torch.zeros(100, 4, device=DEVICE)
        query = kernels.store(
            torch.zeros(tokens, 64, device=DEVICE), cache, slots, positions, angles, angles, None, 1e-6
        )
        tiles = torch.from_numpy(slot_attention.tile_segments(segments, 4)).to(DEVICE)
        kernels.attend(query, cache, tiles, 4, splits)

    def compiled() -> list[int]:
        return [len(kernel.device_caches[0][0]) for kernel in (kernels._store_kernel, kernels._attention_kernel)]

    cache = torch.zeros(2, 4, 100, 8, device=DEVICE)
    compute(5, 2)
    before = compiled()
    for tokens in (1, 3, 8, 16, 17, 32, 50):
        for splits in (2, 3, 16):
            compute(tokens, splits)
    assert compiled() == before
