"""One step of a Llama-like model without the model's own Python code, which takes most of the time for small models.

For a CPU, in float32 or float64; `device_llama` is for a GPU. The tokens of all requests of a step are multiplied with
each matrix together; only attention is computed per request.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # torch's convention
from torch import Tensor, nn
from transformers import PreTrainedModel

from leyden.engine.torch.forward import Segment, logit_rows, replace_unread
from leyden.engine.torch.kv_cache import KVCache

MAX_COPIED_PARAMETERS = 50_000_000
"""Smaller models have their matrices copied as [in, out]: products with few rows take a quarter less time."""
ATTENTION_CALL_BYTES = 400_000
"""Bytes of KV cache that are read in the time that one attention call costs: less padding than this is cheaper."""


def is_llama_like(model: PreTrainedModel) -> bool:
    """Whether a model is a Llama, SmolLM2, Qwen2 or Qwen3 with plain linear layers and full attention."""
    if type(model).__name__ not in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        return False
    config: Any = model.config
    inner: Any = model.model
    plain = all(
        type(part) is nn.Linear and (part.bias is None or name in ("q_proj", "k_proj", "v_proj"))
        for layer in inner.layers
        for name, part in (*layer.self_attn.named_children(), *layer.mlp.named_children())
        if name.endswith("_proj")
    )
    full = set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    static = inner.rotary_emb.rope_type in ("default", "linear", "llama3", "yarn")
    whole = 2 * inner.rotary_emb.inv_freq.numel() == inner.layers[0].self_attn.head_dim
    return plain and full and static and whole and config.hidden_act == "silu" and type(model.lm_head) is nn.Linear


class AttentionCall(NamedTuple):
    """One call of the attention: over several slots with one new token each, or one slot with several."""

    tokens: slice
    slots: slice
    length: int
    mask: Tensor | None
    causal: bool


class LayerWeights:
    """The weights of one layer as [in, out]: views of the shared parameters or copies.

    Query, key and value are one matrix, in which the two halves of each rotary pair are adjacent: rotating is then one
    complex multiplication.
    """

    def __init__(self, layer: Any, head_size: int, copied: bool) -> None:
        self.layer, self.head_size, self.copied = layer, head_size, copied
        self.refresh()

    def refresh(self) -> None:
        """Copy or look up the weights again; looking up attributes of modules in each step would be slow."""
        attention, mlp, interleave = self.layer.self_attn, self.layer.mlp, self._interleave
        self.attention_norm = _weight(self.layer.input_layernorm)
        self.mlp_norm = _weight(self.layer.post_attention_layernorm)
        linear = attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.output, self.gate, self.up, self.down = (_matrix(module, self.copied) for module in linear)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        query, key, value = map(_weight, projections)
        self.qkv = torch.cat((interleave(query), interleave(key), value)).t().contiguous()
        self.bias: Tensor | None = None
        if attention.q_proj.bias is not None:
            query, key, value = (projection.bias.detach() for projection in projections)
            self.bias = torch.cat((interleave(query), interleave(key), value))
        self.head_norm: Tensor | None = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)
            heads = [interleave(_weight(norm)).expand(of.out_features // self.head_size, -1) for norm, of in norms]
            self.head_norm = torch.cat(heads)

    def _interleave(self, weight: Tensor) -> Tensor:
        return weight.view(-1, 2, self.head_size // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight.detach()


def _matrix(module: Any, copied: bool) -> Tensor:
    return _weight(module).t().contiguous() if copied else _weight(module).t()


class LlamaForward:
    """Computes steps directly from the parameters of a Llama-like model."""

    shares_parameters = True

    def __init__(self, model: PreTrainedModel, kv_cache: KVCache) -> None:
        self._model: Any = model
        self._kv_cache = kv_cache
        config = model.config
        self._size = self._model.model.layers[0].self_attn.head_dim
        self._key_heads = config.num_key_value_heads
        self._heads = config.num_attention_heads
        self._eps = config.rms_norm_eps
        self._max_padding = ATTENTION_CALL_BYTES // (2 * self._key_heads * self._size * kv_cache.dtype.itemsize)
        self._copied = sum(parameter.numel() for parameter in model.parameters()) < MAX_COPIED_PARAMETERS
        self._layers = [LayerWeights(layer, self._size, self._copied) for layer in self._model.model.layers]
        self._head = _matrix(self._model.lm_head, self._copied)
        for index in range(len(self._layers)):
            kv_cache.buffer(index, 2 * self._key_heads, self._size)
        self._rotations = torch.empty(0)

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Whether this class computes the model exactly."""
        on_cpu = model.device.type == "cpu" and model.dtype in (torch.float32, torch.float64)
        return on_cpu and is_llama_like(model)

    def refresh(self) -> None:
        """Copy the weights again that are kept in another layout."""
        self._head = _matrix(self._model.lm_head, self._copied)
        for layer in self._layers:
            layer.refresh()

    def __call__(self, segments: Sequence[Segment], sampled: Tensor | None = None) -> Tensor:
        """Compute all tokens together, and logits for the segments that need them."""
        if self._rotations.shape[0] != self._kv_cache.length:
            self._rotations = self._compute_rotations()
        ids = torch.tensor([id for segment in segments for id in segment.ids])
        slot = torch.tensor([one.slot for one in segments for _ in one.ids])
        position = torch.tensor([at for one in segments for at in range(one.start, one.end)])
        rotations = self._rotations[position]
        calls = self._calls(segments, position)
        ids = replace_unread(ids, slot, sampled)
        hidden = F.embedding(ids, self._model.model.embed_tokens.weight)
        for layer, buffer in zip(self._layers, self._kv_cache.buffers, strict=True):
            hidden = self._layer(layer, buffer, hidden, slot, position, rotations, calls)
        if len(segments) != len(ids) or not all(segment.needs_logits for segment in segments):
            hidden = hidden[torch.from_numpy(logit_rows(segments))]
        return torch.mm(self._norm(hidden, self._model.model.norm.weight), self._head).float()

    def _layer(
        self,
        layer: LayerWeights,
        buffer: Tensor,
        hidden: Tensor,
        slot: Tensor,
        position: Tensor,
        rotations: Tensor,
        calls: Sequence[AttentionCall],
    ) -> Tensor:
        heads, keys = self._heads, self._heads + self._key_heads
        normed = self._norm(hidden, layer.attention_norm)
        qkv = torch.mm(normed, layer.qkv) if layer.bias is None else torch.addmm(layer.bias, normed, layer.qkv)
        qkv = qkv.view(len(hidden), -1, self._size)
        rotated = qkv[:, :keys]
        if layer.head_norm is not None:
            rotated.copy_(F.rms_norm(rotated, (self._size,), None, self._eps) * layer.head_norm)
        torch.view_as_complex(rotated.view(len(hidden), keys, -1, 2)).mul_(rotations)
        buffer[slot, :, position] = qkv[:, heads:]
        parts = [self._attend(qkv[call.tokens, :heads], buffer, call) for call in calls]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        hidden = torch.addmm(hidden, attended, layer.output)
        normed = self._norm(hidden, layer.mlp_norm)
        gate = F.silu(torch.mm(normed, layer.gate), inplace=True)
        gate.mul_(torch.mm(normed, layer.up))
        return torch.addmm(hidden, gate, layer.down)

    def _attend(self, query: Tensor, buffer: Tensor, call: AttentionCall) -> Tensor:
        """Compute the attention of [token, head, size]. Heads that share a key are its queries, or use views of it."""
        tokens, keys = len(query), self._key_heads
        cached = buffer[call.slots, :, : call.length]
        key, value = cached[:, :keys], cached[:, keys:]
        query = query.view(tokens, keys, -1, self._size)
        if not call.causal:
            mask = call.mask if call.mask is None else call.mask.expand(-1, 1, query.shape[2], -1)
            return F.scaled_dot_product_attention(query, key, value, mask).reshape(tokens, -1)
        key, value = (part[0][:, None].expand(-1, query.shape[2], -1, -1) for part in (key, value))
        whole = call.mask is None
        output = F.scaled_dot_product_attention(query.permute(1, 2, 0, 3), key, value, call.mask, is_causal=whole)
        return output.permute(2, 0, 1, 3).reshape(tokens, -1)

    def _calls(self, segments: Sequence[Segment], position: Tensor) -> list[AttentionCall]:
        """Group neighbouring slots with one token each and similar lengths; a longer segment has its own call."""
        calls: list[AttentionCall] = []
        at = begin = longest = total = 0
        for index, segment in enumerate(segments):
            at += len(segment.ids)
            longest, total = max(longest, segment.end), total + segment.end
            following = segments[index + 1] if index + 1 < len(segments) else None
            slots = slice(segment.slot + 1 - (at - begin), segment.slot + 1)
            if len(segment.ids) > 1:
                slots = slice(segment.slot, segment.slot + 1)
            elif following and len(following.ids) == 1 and following.slot == segment.slot + 1:
                padded = (at - begin + 1) * max(longest, following.end)
                if padded - total - following.end <= self._max_padding:
                    continue
            calls.append(self._call(slice(begin, at), slots, longest, position))
            begin, longest, total = at, 0, 0
        return calls

    def _call(self, tokens: slice, slots: slice, length: int, position: Tensor) -> AttentionCall:
        last = position[tokens]
        causal = len(last) > slots.stop - slots.start
        if length == len(last) if causal else bool((last == length - 1).all()):
            return AttentionCall(tokens, slots, length, None, causal)
        late = torch.arange(length) > last[:, None]
        mask = torch.zeros(late.shape, dtype=self._kv_cache.dtype).masked_fill_(late, -torch.inf)
        return AttentionCall(tokens, slots, length, mask if causal else mask[:, None, None], causal)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], weight, self._eps)

    def _compute_rotations(self) -> Tensor:
        """Compute, by position, the complex numbers that rotate each pair."""
        some = torch.empty(0, dtype=torch.promote_types(self._kv_cache.dtype, torch.float32))
        cosine, sine = self._model.model.rotary_emb(some, torch.arange(self._kv_cache.length)[None])
        half = self._size // 2
        return torch.complex(cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous())[:, None]
