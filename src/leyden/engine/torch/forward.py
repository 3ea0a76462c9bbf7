"""One step of any Hugging Face causal model: over rows of keys and values, or of whole sequences."""

import copy
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from leyden.engine.torch.kv_cache import KVCache

log = logging.getLogger(__name__)

WHOLE = 8
"""Whole sequences that are computed together: more would be padded more, and take more memory."""
_KINDS = {"full_attention", "sliding_attention"}


class Segment(NamedTuple):
    """Tokens to compute in one row, after the `start` that are there already."""

    row: int
    start: int
    ids: Sequence[int]
    wanted: bool
    """Whether the logits of what follows its last token are."""

    @property
    def end(self) -> int:
        """The length of the row afterwards."""
        return self.start + len(self.ids)


class EngineForward(Protocol):
    """Computes a step: the segments of one token come first, by row; then the longer ones."""

    def __call__(self, segments: Sequence[Segment]) -> Tensor:
        """Logits of [wanted segment, vocabulary], in float32."""

    def refresh(self) -> None:
        """The weights have changed."""


class HubForward:
    """Runs the model's own code, all segments of one token together and the others one by one."""

    def __init__(self, model: PreTrainedModel, rows: KVCache) -> None:
        self._model = _beside(model)
        config = model.config.get_text_config()
        self._kinds = set(getattr(config, "layer_types", None) or ())
        self._window: int | None = getattr(config, "sliding_window", None)
        self._rows = rows

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether keys and values are all that the model's layers keep."""
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        return kinds <= _KINDS and not model._is_stateful

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def __call__(self, segments: Sequence[Segment]) -> Tensor:
        """Run the model once for all single tokens and once for each longer segment."""
        batches = [
            batch
            for single, some in groupby(segments, lambda segment: len(segment.ids) == 1)
            for batch in ([list(some)] if single else [[one] for one in some])
        ]
        return torch.cat([self._logits(batch)[[one.wanted for one in batch]] for batch in batches])

    def _logits(self, batch: Sequence[Segment]) -> Tensor:
        device = self._rows.device
        ids = torch.tensor([segment.ids for segment in batch], device=device)
        starts = torch.tensor([segment.start for segment in batch], device=device)
        positions = starts[:, None] + torch.arange(ids.shape[1], device=device)
        length = max(segment.end for segment in batch)
        cache = SlotCache(self._rows, [segment.row for segment in batch], positions, length)
        mask = self._mask(positions, length)
        answer = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = answer.logits[:, -1].float()
        return logits

    def _mask(self, positions: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        distance = positions[:, None, :, None] - torch.arange(length, device=positions.device)
        full = torch.zeros(distance.shape, dtype=self._rows.dtype, device=positions.device)
        full.masked_fill_(distance < 0, torch.finfo(full.dtype).min)
        if self._window is None or self._kinds == {"full_attention"}:
            return full
        near = full.masked_fill(distance >= self._window, torch.finfo(full.dtype).min)
        return {"full_attention": full, "sliding_attention": near} if len(self._kinds) > 1 else near


class SlotCache(Cache):
    """The cache that the model's code sees: writes into the rows of one batch, and answers with them."""

    def __init__(self, rows: KVCache, batch: list[int], positions: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._store, self._batch, self._length = rows, batch, length
        self._index = torch.tensor(batch, device=rows.device)[:, None], positions
        first, last = batch[0], batch[-1]
        # a gap makes a copy, which is what a cache that grows by concatenation makes at every step
        self._taken: Any = slice(first, last + 1) if last - first == len(batch) - 1 else self._index[0][:, 0]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write what is new, and give all there is."""
        keys = self._write(2 * layer_idx, key_states)
        return keys, self._write(2 * layer_idx + 1, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The longest row, before this step."""
        return self._length - self._index[1].shape[1]

    def _write(self, plane: int, states: Tensor) -> Tensor:
        held = self._store.plane(plane, states.shape[1], states.shape[3])
        row, position = self._index
        held[row, :, position] = states.transpose(1, 2)
        return held[:, :, : self._length][self._taken]


class RecomputeForward:
    """Runs the model's own code over each sequence from its beginning, and keeps nothing but token ids.

    Slow, and right for every causal model: what is padded on the right is seen by nobody.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._device = _beside(model), model.device
        self._ids: dict[int, list[int]] = {}
        log.warning(
            "not all layers of %s are attention: each token that it draws is computed from the beginning of its"
            " sequence, which is slow",
            type(model).__name__,
        )

    def refresh(self) -> None:
        """Nothing is derived from the weights."""

    def __call__(self, segments: Sequence[Segment]) -> Tensor:
        """Run the model for those that are wanted, sequences of like lengths together."""
        for segment in segments:
            self._ids[segment.row] = [*self._ids.get(segment.row, ())[: segment.start], *segment.ids]
        wanted = [self._ids[segment.row] for segment in segments if segment.wanted]
        order = sorted(range(len(wanted)), key=lambda index: len(wanted[index]))
        logits: list[Any] = [None] * len(wanted)
        for first in range(0, len(order), WHOLE):
            some = order[first : first + WHOLE]
            for index, one in zip(some, self._logits([wanted[index] for index in some]), strict=True):
                logits[index] = one
        return torch.stack(logits) if logits else torch.empty(0, device=self._device)

    def _logits(self, sequences: Sequence[list[int]]) -> Tensor:
        width = max(map(len, sequences))
        ids = torch.tensor([[*each, *[0] * (width - len(each))] for each in sequences], device=self._device)
        last = torch.tensor([len(each) - 1 for each in sequences], device=self._device)
        kept, of = last.unique(return_inverse=True)
        answer = self._model(input_ids=ids, use_cache=False, logits_to_keep=kept)
        logits: Tensor = answer.logits[torch.arange(len(sequences), device=self._device), of].float()
        return logits


def _beside(model: PreTrainedModel) -> Any:
    """A second tree of modules over the same parameters, which stays in evaluation.

    The trainer may set `train()`, checkpointing or another attention on its own.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    ours: Any = copy.deepcopy(model, shared)
    ours.train(False)
    if model.config.get_text_config()._attn_implementation not in ("eager", "sdpa"):
        ours.set_attn_implementation("sdpa")
    return ours
