"""What a checkpoint is written from, so that it can be written while training goes on."""

from collections.abc import Mapping
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from transformers import PreTrainedModel

from leyden.learner.moments import moments_of
from leyden.learner.policy import Policy
from leyden.learner.protocol import TrainerState
from leyden.process.resources import free_memory

RNG = "rng"
COPY_SHARE = 0.5
"""A copy, those of all ranks together, takes at most this share of the memory that is free: agents need some too."""


class Snapshot(Struct, frozen=True):
    """The tensors and the state of a training."""

    state: TrainerState
    model: PreTrainedModel
    """The model that the weights are of; nothing else is read from it."""
    weights: Mapping[str, Tensor]
    extra: Mapping[str, Tensor]
    """Trained parameters that are not in the model: LoRA matrices, a critic."""
    optimiser: Mapping[str, Tensor]
    """Moments and step counts, and the state of the random numbers."""

    @classmethod
    def of(cls, policy: Policy, state: TrainerState, moments: bool) -> "Snapshot":
        """Return that of a policy as it is, with or without its moments; it shares the policy's memory."""
        extra = {name: each.detach().contiguous() for name, each in policy.extra_parameters.items()}
        optimiser = {name: each.contiguous() for name, each in moments_of(policy).items()} if moments else {}
        return cls(state, policy.served, policy.weights(), extra, {**optimiser, RNG: torch.get_rng_state()})

    def copy(self) -> "Snapshot | None":
        """Copy it to memory of its own on the host; None if there is too little. Tied weights stay tied."""
        parts = (self.weights, self.extra, self.optimiser)
        different = {_place(tensor): tensor for part in parts for tensor in part.values()}
        if sum(tensor.nbytes for tensor in different.values()) > COPY_SHARE * free_memory():
            return None
        copies = {place: tensor.detach().to("cpu", copy=True) for place, tensor in different.items()}
        copied = ({name: copies[_place(tensor)] for name, tensor in part.items()} for part in parts)
        return Snapshot(self.state, self.model, *copied)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
