"""The mask of a tree, token by token: what the masks of `tree_attention` have to agree with."""

import torch


def dense_mask(ends: torch.Tensor, depths: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return which nodes each node attends to: its ancestors, within the window."""
    node = torch.arange(ends.shape[1])
    attends = (node[None, None, :] <= node[None, :, None]) & (node[None, :, None] < ends[:, None, :])
    if window is not None:
        attends &= depths[:, :, None] - depths[:, None, :] < window
    return attends[:, None]
