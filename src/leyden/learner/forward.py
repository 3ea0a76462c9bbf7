"""Runs a model over a micro-batch: logprobs and entropies of the sampled tokens, and the critic's values."""

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from leyden.learner.microbatch import MicroBatch
from leyden.learner.tree_attention import TreeMasks
from leyden.rl.logprobs import Head, logprobs


class ForwardOutput(NamedTuple):
    """The outputs of a model on a micro-batch."""

    logprobs: Tensor
    """Logprobs of every sampled token, sample after sample, temperature applied."""
    entropies: Tensor
    values: Tensor | None
    """The critic's value of the state of every sample, if there is a critic."""


class PolicyForward(nn.Module):
    """Runs a model over micro-batches. Logits are computed only where a token was sampled.

    It is a module so that a sharded model is whole while one call computes with parts of it (`leyden.learner.ranks`).
    Until `find_head` is called, all logits are computed.
    """

    def __init__(self, model: PreTrainedModel, masks: TreeMasks | None) -> None:
        super().__init__()
        self._model, self._masks = model, masks
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._head: Head | None = None

    def forward(
        self, microbatch: MicroBatch, critic: Callable[[Tensor], Tensor] | None = None, entropy_gradient: bool = False
    ) -> ForwardOutput:
        """Run one micro-batch. Entropies have a gradient only with `entropy_gradient`."""
        device = self._model.device
        inputs: dict[str, Any] = {"input_ids": microbatch.ids.to(device), "use_cache": False}
        if microbatch.nodes is not None and self._masks is not None:
            positions = torch.from_numpy(microbatch.nodes.depths).to(device)
            inputs |= {"attention_mask": self._masks(microbatch.nodes), "position_ids": positions}
        predictors, targets = microbatch.predictors.to(device), microbatch.targets.to(device)
        temperatures = microbatch.temperatures.to(device)
        if self._head is not None:
            hidden = self._trunk(**inputs).last_hidden_state.flatten(0, 1)
            wanted, head = hidden[predictors], self._head
        else:
            output = self._model(**inputs, output_hidden_states=critic is not None)
            hidden = output.hidden_states[-1].flatten(0, 1) if critic is not None else None
            wanted, head = output.logits.flatten(0, 1)[predictors], _identity
        found, entropies = logprobs(head, wanted, targets, temperatures, self._vocabulary, entropy_gradient)
        gather = microbatch.gather.to(device)
        # Detached: the critic's gradient does not change the policy.
        values = critic(hidden.detach()[microbatch.states.to(device)]) if critic is not None else None
        return ForwardOutput(found[gather], entropies[gather], values)

    @property
    def _trunk(self) -> Any:
        return self._model.base_model

    @torch.no_grad()
    def find_head(self, ids: Tensor) -> None:
        """Find the model's function from hidden states to logits, which may scale or bound them, by some tokens."""
        output = self._trunk(input_ids=ids, use_cache=False)
        head = _head_of(self._model, type(output))
        ours = head(output.last_hidden_state[0])
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        if torch.allclose(ours, logits, rtol=1e-3, atol=1e-3 * logits.abs().max().item()):
            self._head = head


def _head_of(model: PreTrainedModel, output_type: Any) -> Head:
    """Build the head from the model's own code: its trunk is replaced by one that returns its input."""
    outside: Any = copy(model)
    trunk: Any = copy(model.base_model)
    trunk.forward = lambda *_, inputs_embeds, **__: output_type(last_hidden_state=inputs_embeds)
    outside._modules = {**model._modules, model.base_model_prefix: trunk}

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = outside(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    return head


def _identity(logits: Tensor) -> Tensor:
    return logits
