"""LoRA: trains small matrices beside the weights.

The served model is a separate copy with the matrices merged: it samples at full speed and is saved as any model. The
trainer computes with its weights too, so that sampler and trainer agree to the last bit of them; only gradients go
through the matrices. In bfloat16 the merged weights are rounded stochastically: most updates are too small to be seen
in a weight that is rounded to the nearest number, and the trainer and the engine would go on with the old one.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F  # noqa: N812  # torch's convention
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from leyden.config import AdapterConfig, ConfigError
from leyden.engine.protocol import LoraWeights
from leyden.learner.stochastic_rounding import round_to_bfloat16

_NAME = "default"


class MergedLoraLinear(LoraLinear):
    """A linear layer that computes with the merged weight; the gradient goes to the adapter instead."""

    served_weight: Tensor
    """The weight that the adapter is merged into."""
    unmerged = False
    """Add the adapter's output to that of the weight, as PEFT does."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output."""
        if self.unmerged or self.disable_adapters:
            return super().forward(x, *args, **kwargs)
        down: Any = self.lora_A[_NAME]
        up: Any = self.lora_B[_NAME]
        base: Any = self.get_base_layer()
        added = self.scaling[_NAME] * up(down(x.detach().to(down.weight.dtype)))
        merged: Tensor = F.linear(x, self.served_weight, base.bias)
        zero: Tensor = added - added.detach()
        return merged + zero.to(merged.dtype)  # it has the adapter's gradient

    def merged_weight(self) -> Tensor:
        """Compute the weight with the adapter, in the adapter's precision."""
        base: Any = self.get_base_layer()
        merged: Tensor = base.weight + self.get_delta_weight(_NAME)
        return merged


class LoraAdapter:
    """Adapters in a copy of a model; only they are trained."""

    def __init__(
        self, served: PreTrainedModel, config: AdapterConfig, merged: bool = True, beside: "LoraAdapter | None" = None
    ) -> None:
        """Without `merged` they are in the model itself, and there is no other to publish.

        `beside` is an adapter of the same model: both copies share one set of weights, which do not change.
        """
        linear = {name.rpartition(".")[2] for name, each in served.named_modules() if isinstance(each, torch.nn.Linear)}
        if linear.isdisjoint(config.modules):
            known = ", ".join(sorted(linear))
            raise ConfigError(f"`training.lora.modules`: the model has no such layer; its linear layers are {known}")
        self._served, self.rank = served if merged else None, config.rank
        lora = LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.modules))
        lora._register_custom_module({torch.nn.Linear: MergedLoraLinear})  # documented, in spite of its name
        shared = dict(beside.base_parameters()) if beside is not None else {}
        same = {id(each): shared[name] for name, each in served.named_parameters() if name in shared}
        self.model = (deepcopy(served, same) if merged else served).requires_grad_(False)
        inject_adapter_in_model(lora, self.model, _NAME)
        self.layers = {name: layer for name, layer in self.model.named_modules() if isinstance(layer, MergedLoraLinear)}
        """The layers that have matrices, by their names in the model."""
        precision = torch.promote_types(served.dtype, torch.float32)  # whatever the precision of the model
        for name, layer in self.layers.items():
            layer.lora_A[_NAME].to(precision)
            layer.lora_B[_NAME].to(precision)
            if merged:
                weight = served.get_parameter(f"{name}.weight").detach()
                layer.register_buffer("served_weight", weight, persistent=False)
        if not merged:
            self.compute_unmerged()

    def compute_unmerged(self) -> None:
        """Compute as an engine does that keeps adapters unmerged, so that both agree."""
        for layer in self.layers.values():
            layer.unmerged = True

    @torch.no_grad()
    def publish(self) -> None:
        """Merge the adapters into the served model, if there is one."""
        if self._served is None:
            return
        for name, layer in self.layers.items():
            served: Any = self._served.get_submodule(name)
            merged = layer.merged_weight()
            if served.weight.dtype == torch.bfloat16:
                merged = round_to_bfloat16(merged, crc32(name.encode()))
            served.weight.copy_(merged)

    @torch.no_grad()
    def clear(self) -> None:
        """Make the adapters add nothing, as before training, and merge that."""
        for layer in self.layers.values():
            up: Any = layer.lora_B[_NAME]
            up.weight.zero_()
        self.publish()

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the model without its adapters, by the names that they have in it."""
        return ((name, parameter.detach()) for name, parameter in self.base_parameters())

    def base_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of the model without its adapters, by the names that they have in it."""
        for name, parameter in self.model.named_parameters():
            if ".lora_" not in name:
                yield name.replace(".base_layer.", "."), parameter

    def weights(self) -> LoraWeights:
        """Return the adapters; the scale is part of `lora_B`."""
        return self.saved_weights(dict(self.model.named_parameters()))

    @torch.no_grad()
    def saved_weights(self, saved: Mapping[str, Tensor] | None) -> LoraWeights:
        """Return adapters from the parameters of a checkpoint, by their names; without one, some that add nothing."""
        tensors: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            for kind, matrix, scale in (("lora_A", layer.lora_A, 1.0), ("lora_B", layer.lora_B, layer.scaling[_NAME])):
                own: Any = matrix[_NAME]
                tensors[f"{name}.{kind}.weight"] = (
                    torch.zeros_like(own.weight) if saved is None else scale * saved[f"{name}.{kind}.{_NAME}.weight"]
                )
        return LoraWeights(self.rank, tensors)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Disable the adapters: the model is as before training."""
        for layer in self.layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)
