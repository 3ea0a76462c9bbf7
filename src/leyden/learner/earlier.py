"""Policies that are not trained: they have the weights of a checkpoint of one that is."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from leyden.engine.protocol import LoraWeights
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.loading import read_model
from leyden.learner.moments import read_beside

if TYPE_CHECKING:
    from leyden.learner.lora import LoraAdapter  # peft takes a while to import


class EarlierModel:
    """All weights of a checkpoint, in a model of its own; adapters are merged."""

    def __init__(self, model: PreTrainedModel, checkpoints: Checkpoints) -> None:
        """`checkpoints` are those of the policy that is trained."""
        self._model, self.checkpoints = model, checkpoints

    @torch.no_grad()
    def load(self, step: int) -> None:
        """Take the weights of a checkpoint, of step 0 those before training."""
        self._model.load_state_dict(read_model(self.checkpoints.folder_of(step), self._model.dtype).state_dict())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights."""
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def adapter(self) -> None:
        """Return None: there is none."""


class EarlierAdapter:
    """The LoRA adapter of a checkpoint, for an engine that serves it over the base of the policy that is trained."""

    def __init__(self, trained: "LoraAdapter", checkpoints: Checkpoints) -> None:
        self._trained, self.checkpoints = trained, checkpoints
        self._saved: dict[str, Tensor] | None = None

    def load(self, step: int) -> None:
        """Take the adapter of a checkpoint, of step 0 one that adds nothing."""
        self._saved = read_beside(self.checkpoints.folder_of(step)) if step else None

    def tensors(self) -> NoReturn:
        """Raise: only the adapter is served."""
        raise AssertionError("the base is that of another policy")

    def adapter(self) -> LoraWeights:
        """Return the adapter."""
        return self._trained.saved_weights(self._saved)


EarlierPolicy = EarlierModel | EarlierAdapter
