"""Attention over prefix trees: each token attends to its ancestors, within the window of layers that have one.

On a CPU it is computed along paths (`path_attention`). On a GPU it is computed by FlexAttention, which skips blocks of
128 x 128 tokens that are masked entirely.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from leyden.learner.microbatch import TreeNodes
from leyden.learner.path_attention import PathMask, path_attention

Mask = PathMask | BlockMask
NAME = "leyden"
"""Name under which the attention is registered in transformers."""
BLOCK = 128
"""Block size of FlexAttention, in tokens."""
_KINDS = {"full_attention", "sliding_attention"}


class TreeMasks:
    """Sets a model's attention to `_attend`, and builds the masks of its layers for micro-batches of trees."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self._windows: dict[str, int | None] = {kind: window if kind.startswith("sliding") else None for kind in kinds}
        if not kinds:
            self._windows = {"": window}
        self._model = model
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)

    @staticmethod
    def fit(model: PreTrainedModel) -> str | None:
        """Return why a model cannot use a tree mask; None if it can."""
        config = model.config.get_text_config()
        if unknown := set(getattr(config, "layer_types", None) or ()) - _KINDS:
            return f"it has layers of {', '.join(sorted(unknown))}"
        if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
            return "not all of its layers are attention"
        if config._attn_implementation not in ("sdpa", NAME):
            return f"its attention is {config._attn_implementation}"
        return None

    def __call__(self, nodes: TreeNodes) -> Mask | dict[str, Mask]:
        """Return one mask, or one for each kind of layer if there are several kinds."""
        masks = {kind: self._mask(nodes, window) for kind, window in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, nodes: TreeNodes, window: int | None) -> Mask:
        device = self._model.device
        if device.type == "cpu":
            return PathMask.of(nodes.paths, nodes.kept, nodes.ends.shape[1], window)
        return _block_mask(torch.from_numpy(nodes.ends).to(device), torch.from_numpy(nodes.depths).to(device), window)


def _block_mask(ends: Tensor, depths: Tensor, window: int | None) -> BlockMask:
    """Build the mask in blocks: FlexAttention evaluates `attends` only in partial blocks, not in full ones."""
    rows, width = ends.shape
    count = width // BLOCK
    ends_B, depths_B = ends.view(rows, count, BLOCK), depths.view(rows, count, BLOCK)
    starts = torch.arange(0, width, BLOCK, device=ends.device)
    block = torch.arange(count, device=ends.device)
    earlier = block[None, None, :] < block[None, :, None]  # [row, query block, key block]
    touched = earlier & (ends_B.amax(-1)[:, None, :] > starts[None, :, None])
    full = earlier & (ends_B.amin(-1)[:, None, :] >= starts[None, :, None] + BLOCK)
    if window is not None:
        min_distance = depths_B.amin(-1)[:, :, None] - depths_B.amax(-1)[:, None, :]
        max_distance = depths_B.amax(-1)[:, :, None] - depths_B.amin(-1)[:, None, :]
        touched &= min_distance < window
        full &= max_distance < window
    partial = (touched & ~full) | (block[None, None, :] == block[None, :, None])

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_ancestor = (key <= query) & (query < ends[row, key])
        return is_ancestor if window is None else is_ancestor & (depths[row, query] - depths[row, key] < window)

    return BlockMask.from_kv_blocks(
        *_block_lists(partial), *_block_lists(full), BLOCK_SIZE=BLOCK, mask_mod=attends, seq_lengths=(width, width)
    )


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks that are set for each query block, and their indices, those set first."""
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], indices.to(torch.int32)[:, None]


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for a tree mask, or as transformers does for any other mask."""
    if isinstance(attention_mask, PathMask):
        return path_attention(query, key, value, attention_mask, scaling), None
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # One kernel of the backward pass covers all queries that attend to a block of keys, of all heads that share the
    # keys. For a prompt that a whole group shares it runs long after the others, so every head gets its own keys.
    heads_per_key = query.shape[1] // key.shape[1]
    if heads_per_key > 1:
        key, value = (each.repeat_interleave(heads_per_key, dim=1) for each in (key, value))
    attention = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    output = attention(query, key, value, block_mask=attention_mask, scale=scaling)
    return output.transpose(1, 2).contiguous(), None
