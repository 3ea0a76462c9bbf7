"""One step of a Llama-like model, without its Python: for small models on a CPU that is most of the time.

Llama, SmolLM2, Qwen2 and Qwen3 in float32 or float64, with plain linear layers. Everything else runs its own code.
All tokens of a step go through each matrix together, whatever request they belong to; only attention is apart.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import PreTrainedModel

from leyden.engine.torch.forward import Segment
from leyden.engine.torch.kv_cache import KVCache

COPIED = 50_000_000
"""Parameters below which all matrices are copied as [in, out]: products with few rows take a quarter less time."""
CALL_BYTES = 400_000
"""Keys and values that are read in the time one more call of the attention takes: so much padding is cheaper."""


class Attention(NamedTuple):
    """One call of the attention: rows of one new token each, or one row of several."""

    tokens: slice
    rows: slice
    length: int
    mask: Tensor | None
    causal: bool


class LayerWeights:
    """The weights of one layer as [in, out]: the shared parameters, or copies, and one matrix of the attention's input.

    In that the two halves of each rotary pair stand side by side, so that rotating is one complex product.
    """

    def __init__(self, layer: Any, head_size: int, copied: bool) -> None:
        self.layer, self.head_size, self.copied = layer, head_size, copied
        self.refresh()

    def refresh(self) -> None:
        """Copy anew what is copied, and look up all else: modules are slow to ask."""
        attention, mlp, paired = self.layer.self_attn, self.layer.mlp, self._paired
        self.before, self.between = _weight(self.layer.input_layernorm), _weight(self.layer.post_attention_layernorm)
        linear = attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.output, self.gate, self.up, self.down = (_matrix(module, self.copied) for module in linear)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        query, key, value = map(_weight, projections)
        self.qkv = torch.cat((paired(query), paired(key), value)).t().contiguous()
        self.bias: Tensor | None = None
        if attention.q_proj.bias is not None:
            query, key, value = (projection.bias.detach() for projection in projections)
            self.bias = torch.cat((paired(query), paired(key), value))
        self.norm: Tensor | None = None
        if hasattr(attention, "q_norm"):
            norms = (attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj)
            heads = [paired(_weight(norm)).expand(of.out_features // self.head_size, -1) for norm, of in norms]
            self.norm = torch.cat(heads)

    def _paired(self, weight: Tensor) -> Tensor:
        return weight.view(-1, 2, self.head_size // 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight.detach()


def _matrix(module: Any, copied: bool) -> Tensor:
    return _weight(module).t().contiguous() if copied else _weight(module).t()


class LlamaForward:
    """Computes steps straight from the parameters of a Llama-like model."""

    def __init__(self, model: PreTrainedModel, rows: KVCache) -> None:
        self._model: Any = model
        self._rows = rows
        config = model.config
        self._size = self._model.model.layers[0].self_attn.head_dim
        self._key_heads = config.num_key_value_heads
        self._heads = config.num_attention_heads
        self._eps = config.rms_norm_eps
        self._slack = CALL_BYTES // (2 * self._key_heads * self._size * rows.dtype.itemsize)
        self._copied = sum(parameter.numel() for parameter in model.parameters()) < COPIED
        self._layers = [LayerWeights(layer, self._size, self._copied) for layer in self._model.model.layers]
        self._head = _matrix(self._model.lm_head, self._copied)
        for index in range(len(self._layers)):
            rows.plane(index, 2 * self._key_heads, self._size)
        self._turns = torch.empty(0)

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """Whether the model is built as this file computes."""
        config: Any = model.config
        if type(model).__name__ not in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
            return False
        if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.float64):
            return False
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

    def refresh(self) -> None:
        """Copy what is kept in a form of its own."""
        self._head = _matrix(self._model.lm_head, self._copied)
        for layer in self._layers:
            layer.refresh()

    def __call__(self, segments: Sequence[Segment]) -> Tensor:
        """Compute all tokens together, and the logits where they are wanted."""
        if self._turns.shape[0] != self._rows.length:
            self._turns = self._rotations()
        ids = torch.tensor([id for segment in segments for id in segment.ids])
        row = torch.tensor([one.row for one in segments for _ in one.ids])
        position = torch.tensor([at for one in segments for at in range(one.start, one.end)])
        turns = self._turns[position]
        calls = self._calls(segments, position)
        hidden = F.embedding(ids, self._model.model.embed_tokens.weight)
        for layer, plane in zip(self._layers, self._rows.planes, strict=True):
            hidden = self._layer(layer, plane, hidden, row, position, turns, calls)
        if len(segments) != len(ids) or not all(segment.wanted for segment in segments):
            ends = torch.tensor([len(segment.ids) for segment in segments]).cumsum(0) - 1
            hidden = hidden[ends[[segment.wanted for segment in segments]]]
        return torch.mm(self._norm(hidden, self._model.model.norm.weight), self._head).float()

    def _layer(
        self,
        layer: LayerWeights,
        plane: Tensor,
        hidden: Tensor,
        row: Tensor,
        position: Tensor,
        turns: Tensor,
        calls: Sequence[Attention],
    ) -> Tensor:
        heads, keys = self._heads, self._heads + self._key_heads
        normed = self._norm(hidden, layer.before)
        qkv = torch.mm(normed, layer.qkv) if layer.bias is None else torch.addmm(layer.bias, normed, layer.qkv)
        qkv = qkv.view(len(hidden), -1, self._size)
        turned = qkv[:, :keys]
        if layer.norm is not None:
            turned.copy_(F.rms_norm(turned, (self._size,), None, self._eps) * layer.norm)
        torch.view_as_complex(turned.view(len(hidden), keys, -1, 2)).mul_(turns)
        plane[row, :, position] = qkv[:, heads:]
        parts = [self._attend(qkv[call.tokens, :heads], plane, call) for call in calls]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        hidden = torch.addmm(hidden, attended, layer.output)
        normed = self._norm(hidden, layer.between)
        gate = F.silu(torch.mm(normed, layer.gate), inplace=True)
        gate.mul_(torch.mm(normed, layer.up))
        return torch.addmm(hidden, gate, layer.down)

    def _attend(self, query: Tensor, plane: Tensor, call: Attention) -> Tensor:
        """Attention of [token, head, size]: heads that share a key are its queries, or so many views of it."""
        tokens, keys = len(query), self._key_heads
        held = plane[call.rows, :, : call.length]
        key, value = held[:, :keys], held[:, keys:]
        query = query.view(tokens, keys, -1, self._size)
        if not call.causal:
            mask = call.mask if call.mask is None else call.mask.expand(-1, 1, query.shape[2], -1)
            return F.scaled_dot_product_attention(query, key, value, mask).reshape(tokens, -1)
        key, value = (part[0][:, None].expand(-1, query.shape[2], -1, -1) for part in (key, value))
        whole = call.mask is None
        answer = F.scaled_dot_product_attention(query.permute(1, 2, 0, 3), key, value, call.mask, is_causal=whole)
        return answer.permute(2, 0, 1, 3).reshape(tokens, -1)

    def _calls(self, segments: Sequence[Segment], position: Tensor) -> list[Attention]:
        """Neighbouring rows of one token each and of about one length share a call; a longer segment has its own."""
        calls: list[Attention] = []
        at = begin = longest = total = 0
        for index, segment in enumerate(segments):
            at += len(segment.ids)
            longest, total = max(longest, segment.end), total + segment.end
            following = segments[index + 1] if index + 1 < len(segments) else None
            rows = slice(segment.row + 1 - (at - begin), segment.row + 1)
            if len(segment.ids) > 1:
                rows = slice(segment.row, segment.row + 1)
            elif following and len(following.ids) == 1 and following.row == segment.row + 1:
                padded = (at - begin + 1) * max(longest, following.end)
                if padded - total - following.end <= self._slack:
                    continue
            calls.append(self._call(slice(begin, at), rows, longest, position))
            begin, longest, total = at, 0, 0
        return calls

    def _call(self, tokens: slice, rows: slice, length: int, position: Tensor) -> Attention:
        last = position[tokens]
        causal = len(last) > rows.stop - rows.start
        if length == len(last) if causal else bool((last == length - 1).all()):
            return Attention(tokens, rows, length, None, causal)
        late = torch.arange(length) > last[:, None]
        mask = torch.zeros(late.shape, dtype=self._rows.dtype).masked_fill_(late, -torch.inf)
        return Attention(tokens, rows, length, mask if causal else mask[:, None, None], causal)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], weight, self._eps)

    def _rotations(self) -> Tensor:
        """By position, the complex numbers that turn each pair."""
        some = torch.empty(0, dtype=torch.promote_types(self._rows.dtype, torch.float32))
        cosine, sine = self._model.model.rotary_emb(some, torch.arange(self._rows.length)[None])
        half = self._size // 2
        return torch.complex(cosine[0, :, :half].contiguous(), sine[0, :, :half].contiguous())[:, None]
