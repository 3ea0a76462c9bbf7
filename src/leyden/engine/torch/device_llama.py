"""One step of a Llama-like model for a GPU: all tokens of a step together, decoding steps as CUDA graphs.

It computes with its own copy of the weights, in the engine's precision and with matrices joined that have the same
input. `refresh` writes the copy in place, so that captured graphs stay valid.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # torch's convention
from torch import Tensor
from transformers import PreTrainedModel

from leyden.engine.torch.forward import Segment, logit_rows, replace_unread
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.llama import is_llama_like
from leyden.engine.torch.slot_attention import PREFILL_ROWS, attend, store, tile_segments
from leyden.engine.torch.transfer import to_device

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

_CAPTURING = threading.Lock()
"""Engines of several policies capture one after the other: torch has one stream for it."""
Inputs = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class DecodeGraphs:
    """The captured graphs of one computation, from [input, request] to [request, output]; computed directly on a CPU.

    A graph reads its inputs from static buffers. Steps are padded to the next captured size with rows of an unused
    slot. Graphs are captured when a size is first needed, and again after `clear`.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], padding: tuple[int, ...], device: torch.device) -> None:
        """`padding` is the column of inputs that fills a step up to its size."""
        self._compute, self._device = compute, device
        self._padding = np.array(padding, np.int64)[:, None]
        self._graphs: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        self._pool = _new_pool(device)

    @staticmethod
    def fits(requests: int) -> bool:
        """Whether a step with this many requests can be padded to a captured size."""
        return requests <= GRAPH_SIZES[-1]

    def clear(self) -> None:
        """Forget the graphs: tensors that they read or write have moved."""
        self._graphs.clear()
        self._pool = _new_pool(self._device)  # torch refuses a pool whose last graph is gone

    def __call__(self, inputs: Inputs) -> Tensor:
        """Compute one step; the result is valid until the next one."""
        requests = inputs.shape[1]
        size = next(size for size in GRAPH_SIZES if size >= requests)
        padded = np.concatenate((inputs, np.repeat(self._padding, size - requests, 1)), 1)
        if size not in self._graphs:
            buffer = to_device(padded, self._device).clone()
            self._graphs[size] = buffer, self._capture(buffer)
        buffer, replay = self._graphs[size]
        buffer.copy_(to_device(padded, self._device))
        return replay()[:requests]

    def _capture(self, buffer: Tensor) -> Callable[[], Tensor]:
        if self._device.type != "cuda":
            return lambda: self._compute(buffer)
        self._compute(buffer)  # compiles kernels and allocates workspaces, which a capture must not
        graph = torch.cuda.CUDAGraph()
        # other threads, like the trainer's, may use the device during the capture
        with _CAPTURING, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._compute(buffer)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def _new_pool(device: torch.device) -> "torch.cuda._POOL_HANDLE | None":
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


class WeightCopies:
    """Tensors in another precision than the parameters that they copy."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._copies: list[tuple[Tensor, Any, str]] = []

    def join(self, modules: Sequence[Any], name: str = "weight") -> Tensor:
        """Return a copy of the same parameter of several modules, one after another along the first axis."""
        parts = [getattr(module, name) for module in modules]
        length = sum(len(part) for part in parts)
        joined = torch.empty((length, *parts[0].shape[1:]), dtype=self._dtype, device=self._device)
        views = joined.split([len(part) for part in parts])
        self._copies += [(view, module, name) for view, module in zip(views, modules, strict=True)]
        return joined

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the current parameters into the copies."""
        sources = [getattr(module, name).detach() for _, module, name in self._copies]
        torch._foreach_copy_([copy for copy, _, _ in self._copies], sources)


class JoinedLayer:
    """The weights of one layer; matrices with the same input are one."""

    def __init__(self, layer: Any, copies: WeightCopies) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.attention_norm, self.mlp_norm = (
            copies.join([norm]) for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.qkv = copies.join(projections)
        self.bias = copies.join(projections, "bias") if attention.q_proj.bias is not None else None
        self.head_norms: Tensor | None = None
        if hasattr(attention, "q_norm"):
            self.head_norms = copies.join([attention.q_norm, attention.k_norm]).view(2, -1)
        self.output, self.down = copies.join([attention.o_proj]), copies.join([mlp.down_proj])
        self.gate_up = copies.join([mlp.gate_proj, mlp.up_proj])


class DeviceLlamaForward:
    """Computes steps from a copy of the weights of a Llama-like model. The last slot of the KV cache is for padding."""

    shares_parameters = False

    def __init__(self, model: PreTrainedModel, kv_cache: KVCache) -> None:
        self._model: Any = model
        self._kv_cache, config = kv_cache, model.config
        self._size = self._model.model.layers[0].self_attn.head_dim
        self._eps = config.rms_norm_eps
        self._tile_tokens = max(1, PREFILL_ROWS * config.num_key_value_heads // config.num_attention_heads)
        self._copies = WeightCopies(kv_cache.dtype, kv_cache.device)
        self._embedding = self._copies.join([self._model.model.embed_tokens])
        tied = self._model.lm_head.weight is self._model.model.embed_tokens.weight
        self._head = self._embedding if tied else self._copies.join([self._model.lm_head])
        self._norm = self._copies.join([self._model.model.norm])
        self._layers = [JoinedLayer(layer, self._copies) for layer in self._model.model.layers]
        self._copies.refresh()
        for index in range(len(self._layers)):
            kv_cache.buffer(index, 2 * config.num_key_value_heads, self._size)
        self._cosine = self._sine = torch.empty(0)
        self._sampled: Tensor | None = None
        self._moves = kv_cache.moves
        self._graphs = DecodeGraphs(self._decode, (0, kv_cache.slots - 1, 0), kv_cache.device)

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Whether this class computes the model exactly."""
        return is_llama_like(model)

    def refresh(self) -> None:
        """Write the new weights into the copy."""
        self._copies.refresh()

    def __call__(self, segments: Sequence[Segment], sampled: Tensor | None = None) -> Tensor:
        """Replay a graph if every segment is one token that needs logits; otherwise compute the tokens together."""
        if len(self._cosine) != self._kv_cache.length:
            self._compute_rotations()
        if self._moves != self._kv_cache.moves or sampled is not self._sampled:
            self._moves, self._sampled = self._kv_cache.moves, sampled
            self._graphs.clear()
        if self._graphs.fits(len(segments)) and all(len(one.ids) == 1 and one.needs_logits for one in segments):
            inputs = np.array([(one.ids[0], one.slot, one.start) for one in segments], np.int64)
            return self._graphs(np.ascontiguousarray(inputs.T))
        ids = np.concatenate([np.asarray(segment.ids, np.int64) for segment in segments])
        lengths = np.array([len(segment.ids) for segment in segments])
        starts = np.array([segment.start for segment in segments])
        ends = lengths.cumsum()
        slots = np.repeat(np.array([segment.slot for segment in segments]), lengths)
        positions = np.arange(len(ids)) - np.repeat(ends - lengths - starts, lengths)
        device = self._kv_cache.device
        tiles = to_device(tile_segments(segments, self._tile_tokens), device)
        hidden = self._hidden(to_device(np.stack((ids, slots, positions)), device), tiles, self._tile_tokens)
        return self._logits(hidden[to_device(logit_rows(segments), device)])

    def _decode(self, inputs: Tensor) -> Tensor:
        _, slots, positions = inputs
        rows = torch.arange(len(slots), device=slots.device)
        return self._logits(self._hidden(inputs, torch.stack((rows, torch.ones_like(rows), slots, positions)), 1))

    def _hidden(self, inputs: Tensor, tiles: Tensor, tile_tokens: int) -> Tensor:
        """Compute the last hidden states of the tokens with these ids, slots and positions; fills the KV cache."""
        ids, slots, positions = inputs
        hidden = F.embedding(replace_unread(ids, slots, self._sampled), self._embedding)
        for layer, cache in zip(self._layers, self._kv_cache.buffers, strict=True):
            qkv = F.linear(self._normalise(hidden, layer.attention_norm), layer.qkv, layer.bias)
            query = store(qkv, cache, slots, positions, self._cosine, self._sine, layer.head_norms, self._eps)
            hidden = torch.addmm(hidden, attend(query, cache, tiles, tile_tokens), layer.output.t())
            gate, up = F.linear(self._normalise(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, F.silu(gate) * up, layer.down.t())
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._normalise(hidden, self._norm), self._head).float()

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], weight, self._eps)

    def _compute_rotations(self) -> None:
        """Compute, by position, the cosines and sines that rotate each pair."""
        cache, half = self._kv_cache, self._size // 2
        some = torch.empty(0, dtype=torch.promote_types(cache.dtype, torch.float32), device=cache.device)
        cosine, sine = self._model.model.rotary_emb(some, torch.arange(cache.length, device=cache.device)[None])
        self._cosine, self._sine = (table[0, :, :half].contiguous() for table in (cosine, sine))
