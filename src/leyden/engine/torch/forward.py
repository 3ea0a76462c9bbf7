"""One step of any Hugging Face causal model: with the KV cache, or by recomputing whole sequences."""

import copy
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor
from transformers import Cache, PreTrainedModel

from leyden.engine.torch.kv_cache import KVCache

log = logging.getLogger(__name__)

RECOMPUTE_BATCH = 8
"""Sequences that are recomputed together: more would need more padding and memory."""
UNREAD = -1
"""In place of the id of the last token sampled for a slot, which is on the device and not read yet."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


class Segment(Struct, frozen=True, gc=False):
    """Tokens to compute in one slot, after the `start` tokens that are computed already."""

    slot: int
    start: int
    ids: Sequence[int]
    needs_logits: bool
    """Whether the logits after its last token are needed."""
    needs_all_logits: bool = False
    """Whether the logits after each of its tokens are needed."""

    @property
    def end(self) -> int:
        """The number of computed tokens afterwards."""
        return self.start + len(self.ids)

    @property
    def logit_rows(self) -> int:
        """After how many of its last tokens the logits are needed."""
        return len(self.ids) if self.needs_all_logits else int(self.needs_logits)


class EngineForward(Protocol):
    """Computes a step. Segments of one token come first, ordered by slot; then the longer ones."""

    def __call__(self, segments: Sequence[Segment], sampled: Tensor | None = None) -> Tensor:
        """Return logits of [token, vocabulary] after the last `logit_rows` tokens of each segment, in float32.

        `sampled` holds the last sampled id of every slot, for segments of one `UNREAD` token.
        """

    @property
    def shares_parameters(self) -> bool:
        """Whether it reads the model's parameters in a step, and not only in `refresh`."""

    def refresh(self) -> None:
        """Update whatever is derived from the weights, which have changed."""


def logit_rows(segments: Sequence[Segment]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Return the indices, among the tokens of all segments, of those after which logits are needed."""
    ends = np.cumsum([len(segment.ids) for segment in segments])
    counts = np.array([segment.logit_rows for segment in segments])
    firsts = np.repeat(ends - counts - (counts.cumsum() - counts), counts)
    return np.asarray(firsts + np.arange(len(firsts)), np.int64)


def replace_unread(ids: Tensor, slots: Tensor, sampled: Tensor | None) -> Tensor:
    """Return token ids with every `UNREAD` one replaced by the last sampled id of its slot."""
    return ids if sampled is None else torch.where(ids == UNREAD, sampled[slots], ids)


class InferenceCopy:
    """A copy of a model's modules, always in evaluation mode; over the same parameters if those are of this precision.

    The trainer may set `train()`, checkpointing or another attention implementation on the original.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._served, self.shares_parameters = model, dtype == model.dtype
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._model: Any = copy.deepcopy(model, shared if self.shares_parameters else None)
        self._model.train(False)
        if not self.shares_parameters:
            self._model.requires_grad_(False)
            for parameter in self._model.parameters():
                parameter.data = parameter.data.to(dtype)
        if model.config.get_text_config()._attn_implementation not in ("eager", "sdpa"):
            self._model.set_attn_implementation("sdpa")

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the new weights into the copy, unless they are the same."""
        pairs = zip(self._model.parameters(), self._served.parameters(), strict=True)
        apart = [(copy, parameter.detach()) for copy, parameter in pairs if copy is not parameter]
        if apart:
            torch._foreach_copy_([copy for copy, _ in apart], [parameter for _, parameter in apart])


class HubForward(InferenceCopy):
    """Runs the model's own code: all segments of one token together, the others one by one."""

    def __init__(self, model: PreTrainedModel, kv_cache: KVCache) -> None:
        super().__init__(model, kv_cache.dtype)
        config = model.config.get_text_config()
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        self._window: int | None = getattr(config, "sliding_window", None)
        self._kv_cache = kv_cache

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Whether the model's layers keep only keys and values."""
        layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        return layer_types <= _ATTENTION_LAYERS and not model._is_stateful

    def __call__(self, segments: Sequence[Segment], sampled: Tensor | None = None) -> Tensor:
        """Run the model once for all single tokens and once for each longer segment."""
        batches = [
            batch
            for single, some in groupby(segments, lambda segment: len(segment.ids) == 1)
            for batch in ([list(some)] if single else [[one] for one in some])
        ]
        return torch.cat([self._logits(batch, sampled) for batch in batches])

    def _logits(self, batch: Sequence[Segment], sampled: Tensor | None) -> Tensor:
        """Compute segments of the same length, which is 1 if there are several."""
        device = self._kv_cache.device
        ids = torch.tensor([list(segment.ids) for segment in batch], device=device)
        slots = torch.tensor([segment.slot for segment in batch], device=device)
        ids = replace_unread(ids, slots[:, None], sampled)
        starts = torch.tensor([segment.start for segment in batch], device=device)
        positions = starts[:, None] + torch.arange(ids.shape[1], device=device)
        length = max(segment.end for segment in batch)
        cache = SlotCache(self._kv_cache, [segment.slot for segment in batch], positions, length)
        mask = self._mask(positions, length)
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=max(1, batch[0].logit_rows),
        )
        logits: Tensor = output.logits[[segment.logit_rows > 0 for segment in batch]]
        return logits.flatten(0, 1).float()

    def _mask(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        distance = positions[:, None, :, None] - torch.arange(length, device=positions.device)
        full = torch.zeros(distance.shape, dtype=self._kv_cache.dtype, device=positions.device)
        full.masked_fill_(distance < 0, torch.finfo(full.dtype).min)
        if self._window is None or self._layer_types == {"full_attention"}:
            return full
        near = full.masked_fill(distance >= self._window, torch.finfo(full.dtype).min)
        return {"full_attention": full, "sliding_attention": near} if len(self._layer_types) > 1 else near


class SlotCache(Cache):
    """The cache that the model's code sees: writes to and reads from the slots of one batch."""

    def __init__(self, kv_cache: KVCache, slots: list[int], positions: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._kv_cache, self._length = kv_cache, length
        self._index = torch.tensor(slots, device=kv_cache.device)[:, None], positions
        first, last = slots[0], slots[-1]
        # with a gap between slots reading copies, as a cache that grows by concatenation does at every step
        self._slots: Any = slice(first, last + 1) if last - first == len(slots) - 1 else self._index[0][:, 0]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values; return all of them."""
        keys = self._write(2 * layer_idx, key_states)
        return keys, self._write(2 * layer_idx + 1, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the length of the longest sequence before this step. Called by transformers."""
        return self._length - self._index[1].shape[1]

    def _write(self, index: int, states: Tensor) -> Tensor:
        buffer = self._kv_cache.buffer(index, states.shape[1], states.shape[3])
        slot, position = self._index
        buffer[slot, :, position] = states.transpose(1, 2)
        return buffer[:, :, : self._length][self._slots]


class RecomputeForward(InferenceCopy):
    """Runs the model's own code over each sequence from its beginning; keeps only token ids.

    Slow, and correct for every causal model, since no token attends to the padding on its right.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        self._device = model.device
        self._ids: dict[int, list[int]] = {}
        log.warning(
            "not all layers of %s are attention: every sampled token recomputes its whole sequence, which is slow",
            type(model).__name__,
        )

    def __call__(self, segments: Sequence[Segment], sampled: Tensor | None = None) -> Tensor:
        """Run the model for segments that need logits, sequences of similar lengths together; none may be `UNREAD`."""
        for segment in segments:
            self._ids[segment.slot] = [*self._ids.get(segment.slot, ())[: segment.start], *segment.ids]
        needed = [segment for segment in segments if segment.logit_rows]
        order = sorted(range(len(needed)), key=lambda index: needed[index].end)
        logits: list[Any] = [None] * len(needed)
        for first in range(0, len(order), RECOMPUTE_BATCH):
            batch = order[first : first + RECOMPUTE_BATCH]
            for index, rows in zip(batch, self._logits([needed[index] for index in batch]), strict=True):
                logits[index] = rows
        return torch.cat(logits) if logits else torch.empty(0, device=self._device)

    def _logits(self, segments: Sequence[Segment]) -> list[Tensor]:
        width = max(segment.end for segment in segments)
        sequences = [self._ids[segment.slot] for segment in segments]
        ids = torch.tensor([[*each, *[0] * (width - len(each))] for each in sequences], device=self._device)
        positions = [range(segment.end - segment.logit_rows, segment.end) for segment in segments]
        kept = sorted({position for rows in positions for position in rows})
        of = {position: row for row, position in enumerate(kept)}
        wanted = torch.tensor(kept, device=self._device)
        output = self._model(input_ids=ids, use_cache=False, logits_to_keep=wanted)
        return [output.logits[at, [of[position] for position in rows]].float() for at, rows in enumerate(positions)]
