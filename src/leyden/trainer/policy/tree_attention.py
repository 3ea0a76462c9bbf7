"""Attention over trees: each token sees its ancestors, and where a layer has a window only the near ones.

Along paths on a CPU; on a GPU by FlexAttention, which skips the blocks of 128 x 128 in which nobody sees anybody, or by
a dense mask where tokens are few.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from leyden.trainer.batch.microbatch import TreeNodes
from leyden.trainer.policy.path_attention import Paths, path_attention

Mask = Tensor | BlockMask
NAME = "leyden"
"""Under which Hugging Face's models find our attention."""
BLOCK = 128
"""FlexAttention goes by blocks of so many tokens."""
_FEW = 2048
"""So few tokens attend to each other faster by a dense mask, also on a GPU."""
_KINDS = {"full_attention", "sliding_attention"}


class TreeMasks:
    """The masks that a model's layers need for a batch of trees."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        self._windows: dict[str, int | None] = {kind: window if kind.startswith("sliding") else None for kind in kinds}
        if not kinds:
            self._windows = {"": window}
        self._device = model.device
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)

    @staticmethod
    def fit(model: PreTrainedModel) -> str | None:
        """Why a model cannot be given a mask of ours; None where it can."""
        config = model.config.get_text_config()
        if odd := set(getattr(config, "layer_types", None) or ()) - _KINDS:
            return f"it has layers of {', '.join(sorted(odd))}"
        if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
            return "not all of its layers are attention"
        if config._attn_implementation not in ("sdpa", NAME):
            return f"its attention is {config._attn_implementation}"
        return None

    def __call__(self, nodes: TreeNodes) -> Mask | dict[str, Mask]:
        """One mask, or one for each kind of layer."""
        masks = {kind: self._mask(nodes, window) for kind, window in self._windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask(self, nodes: TreeNodes, window: int | None) -> Mask:
        width = nodes.ends.shape[1]
        if self._device.type == "cpu":
            return Paths.of(nodes.paths, nodes.kept, width, window)
        make = _blocks if width > _FEW else _dense
        return make(
            torch.from_numpy(nodes.ends).to(self._device), torch.from_numpy(nodes.depths).to(self._device), window
        )


def _dense(ends: Tensor, depths: Tensor, window: int | None) -> Mask:
    place = torch.arange(ends.shape[1], device=ends.device)
    seen = (place[None, None, :] <= place[None, :, None]) & (place[None, :, None] < ends[:, None, :])
    if window is not None:
        seen &= depths[:, :, None] - depths[:, None, :] < window
    return seen[:, None]


def _blocks(ends: Tensor, depths: Tensor, window: int | None) -> Mask:
    """The mask in blocks: those that are seen in part, and those that are seen whole."""
    lines, width = ends.shape
    number = width // BLOCK
    ends_B, depths_B = ends.view(lines, number, BLOCK), depths.view(lines, number, BLOCK)
    begins = torch.arange(0, width, BLOCK, device=ends.device)
    block = torch.arange(number, device=ends.device)
    before = block[None, None, :] < block[None, :, None]  # [line, who sees, who is seen]
    some = before & (ends_B.amax(-1)[:, None, :] > begins[None, :, None])
    whole = before & (ends_B.amin(-1)[:, None, :] >= begins[None, :, None] + BLOCK)
    if window is not None:
        nearest = depths_B.amin(-1)[:, :, None] - depths_B.amax(-1)[:, None, :]
        furthest = depths_B.amax(-1)[:, :, None] - depths_B.amin(-1)[:, None, :]
        some &= nearest < window
        whole &= furthest < window
    part = (some & ~whole) | (block[None, None, :] == block[None, :, None])

    def seen(line: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        sees = (key <= query) & (query < ends[line, key])
        return sees if window is None else sees & (depths[line, query] - depths[line, key] < window)

    return BlockMask.from_kv_blocks(
        *_listed(part), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(width, width)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks are set for each block of queries, and which, those first."""
    which = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], which.to(torch.int32)[:, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Ours where the mask is ours, and what models do otherwise where it is not."""
    if isinstance(attention_mask, Paths):
        return path_attention(query, key, value, attention_mask, scaling), None
    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **more)
    # A kernel of the backward pass goes over all queries that see a block of keys, of all heads that share them: for a
    # prompt that a whole group shares that takes long, and everybody waits. So every head has its own keys.
    sharing = query.shape[1] // key.shape[1]
    if sharing > 1:
        key, value = (each.repeat_interleave(sharing, dim=1) for each in (key, value))
    seen = _compiled()(query, key, value, block_mask=attention_mask, scale=scaling)
    return seen.transpose(1, 2).contiguous(), None
