"""The mask in blocks, which only a GPU uses, lets each token attend to its ancestors within the window."""

from random import Random

import pytest
import torch
from dense_mask import dense_mask
from torch.nn.attention.flex_attention import flex_attention

from leyden.learner.tree_attention import _block_mask
from leyden.rl.tree import build_tree


def a_forest(seed: int, longest: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    """Ends and depths of some trees behind each other, padded to whole blocks."""
    rng = Random(seed)
    sequences: list[tuple[int, ...]] = []
    for _ in range(12):
        start = rng.choice([(), *sequences])
        start = start[: rng.randint(0, len(start))]
        sequences.append((*start, *(rng.randrange(50) for _ in range(rng.randint(1, longest)))))
    tree = build_tree(sequences)
    width = -(-len(tree.ids) // 128) * 128
    ends, depths = torch.arange(1, width + 1)[None], torch.zeros(1, width, dtype=torch.int64)
    ends[0, : len(tree.ids)], depths[0, : len(tree.ids)] = torch.tensor(tree.ends), torch.tensor(tree.depths)
    return ends, depths


@pytest.mark.parametrize("window", [None, 40, 250])
@pytest.mark.parametrize("seed", range(2))
def test_blocks_attend_as_the_dense_mask_does(seed: int, window: int | None) -> None:
    ends, depths = a_forest(seed, longest=200)
    blocks, dense = _block_mask(ends, depths, window), dense_mask(ends, depths, window)
    torch.manual_seed(seed)
    query, key, value = torch.randn(3, 1, 2, ends.shape[1], 16, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=dense)
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=blocks), expected)


@pytest.mark.parametrize("window", [None, 40, 700])
def test_a_block_that_is_called_whole_is_whole_and_one_left_out_is_empty(window: int | None) -> None:
    ends, depths = a_forest(9)
    blocks, dense = _block_mask(ends, depths, window), dense_mask(ends, depths, window)
    number = ends.shape[1] // 128
    tiles = dense[0, 0].view(number, 128, number, 128).transpose(1, 2)
    whole = set[tuple[int, int]]()
    listed = set[tuple[int, int]]()
    for sample in range(number):
        full, part = blocks.full_kv_num_blocks[0, 0, sample], blocks.kv_num_blocks[0, 0, sample]
        whole |= {(sample, int(at)) for at in blocks.full_kv_indices[0, 0, sample, :full]}
        listed |= {(sample, int(at)) for at in blocks.kv_indices[0, 0, sample, :part]}
    assert (whole or window == 40) and not whole & listed
    for sample in range(number):
        for column in range(number):
            if (sample, column) in whole:
                assert tiles[sample, column].all()
            elif (sample, column) not in listed:
                assert not tiles[sample, column].any()
