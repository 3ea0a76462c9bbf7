"""A model over a batch of rows: the logprobs of their sampled tokens, and what else is read off on the way."""

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leyden.rl.logprobs import Head, logprobs
from leyden.trainer.batch.microbatch import MicroBatch
from leyden.trainer.policy.tree_attention import TreeMasks


class ForwardOutput(NamedTuple):
    """What a model says of the rows of a sheet."""

    logprobs: Tensor
    """Of every sampled token, row after row, temperature applied."""
    entropies: Tensor
    values: Tensor | None
    """Of the state of every row, where there is a critic."""


class PolicyForward:
    """Runs a model over sheets. Its logits are computed only where a token was sampled."""

    def __init__(self, model: PreTrainedModel, masks: TreeMasks | None) -> None:
        self._model, self._masks = model, masks
        self._trunk: Any = model.base_model
        self._vocabulary: int = model.config.get_text_config().vocab_size
        self._head = self._find_head()

    def __call__(
        self, sheet: MicroBatch, critic: Callable[[Tensor], Tensor] | None = None, bonus: bool = False
    ) -> ForwardOutput:
        """Read one sheet; entropies have a gradient where they are a `bonus`."""
        device = self._model.device
        given: dict[str, Any] = {"input_ids": sheet.ids.to(device), "use_cache": False}
        if sheet.nodes is not None and self._masks is not None:
            positions = torch.from_numpy(sheet.nodes.depths).to(device)
            given |= {"attention_mask": self._masks(sheet.nodes), "position_ids": positions}
        predictors, targets = sheet.predictors.to(device), sheet.targets.to(device)
        temperatures = sheet.temperatures.to(device)
        if self._head is not None:
            hidden = self._trunk(**given).last_hidden_state.flatten(0, 1)
            wanted, head = hidden[predictors], self._head
        else:
            answer = self._model(**given, output_hidden_states=critic is not None)
            hidden = answer.hidden_states[-1].flatten(0, 1) if critic is not None else None
            wanted, head = answer.logits.flatten(0, 1)[predictors], _same
        found, entropies = logprobs(head, wanted, targets, temperatures, self._vocabulary, bonus)
        gather = sheet.gather.to(device)
        # What the critic learns stays with the critic: it reads the policy, and does not shape it.
        values = critic(hidden.detach()[sheet.states.to(device)]) if critic is not None else None
        return ForwardOutput(found[gather], entropies[gather], values)

    @torch.no_grad()
    def _find_head(self) -> Head | None:
        """The model's own way from hidden states to logits, which some scale or bound; None where that is not all."""
        ids = torch.arange(4, device=self._model.device)[None]
        answer = self._trunk(input_ids=ids, use_cache=False)
        head = _head_of(self._model, type(answer))
        ours = head(answer.last_hidden_state[0])
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        return head if torch.allclose(ours, logits, rtol=1e-3, atol=1e-3 * logits.abs().max().item()) else None


def _head_of(model: PreTrainedModel, answer: Any) -> Head:
    """A model's own code around its trunk, with one in its place that answers with what it is given."""
    outside: Any = copy(model)
    trunk: Any = copy(model.base_model)
    trunk.forward = lambda *_, inputs_embeds, **__: answer(last_hidden_state=inputs_embeds)
    outside._modules = {**model._modules, model.base_model_prefix: trunk}

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = outside(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    return head


def _same(logits: Tensor) -> Tensor:
    return logits
