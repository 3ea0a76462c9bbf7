"""Computes the loss of an update: the weighted loss of every sampled token, KL and entropy terms, and the critic's."""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from leyden.config import Config, ConfigError, Hyperparameters
from leyden.learner.forward import ForwardOutput
from leyden.learner.loss_functions import LOSS_FUNCTIONS
from leyden.learner.protocol import Logprobs, OldLogprobs
from leyden.learner.sample import Sample
from leyden.learner.user_functions import load_algorithm
from leyden.rl import registry
from leyden.rl.correction import Correction, Level, ratios
from leyden.rl.divergence import ESTIMATES, Estimate
from leyden.rl.loss import Loss, TokenBatch


class Objective(Struct, frozen=True):
    """The loss, its correction, and the weights of the KL and entropy terms."""

    loss: Loss
    hyperparameters: Hyperparameters
    correction: Correction | None = None
    level: Level = "token"
    kl: Estimate | None = None
    """The estimator of the KL divergence from the reference in the loss; None: it is not part of the loss."""
    kl_weight: float = 0.0
    penalty: Estimate | None = None
    """The estimator of the KL divergence from the reference that rewards are penalised for; None: they are not."""
    entropy_weight: float = 0.0
    geometric: bool = False
    """Whether the ratio of a call or rollout is the geometric mean of its tokens' ratios instead of their product."""
    value_clip: float | None = None
    """How far the critic's value may usefully move from that at the start of the step; None: no limit."""


def objective_of(config: Config) -> Objective:
    """Resolve the objective that a configuration names; raise a `ConfigError` that says what to change."""
    named = config.algorithm
    assert named.kl_estimate is not None and named.correction_level is not None, "`AlgorithmConfig` sets defaults"
    kl = ESTIMATES[named.kl_estimate] if named.kl > 0 else None
    try:
        registry.check_settings(named, ("loss", "correction"))
        return Objective(
            loss=load_algorithm("loss", config, LOSS_FUNCTIONS),
            hyperparameters=named,
            correction=None if named.correction == "none" else load_algorithm("correction", config, LOSS_FUNCTIONS),
            level=named.correction_level,
            kl=kl if named.kl_in == "loss" else None,
            kl_weight=named.kl,
            penalty=kl if named.kl_in == "reward" else None,
            entropy_weight=named.entropy,
            geometric=named.correction_ratio == "geometric",
            value_clip=named.value_clip,
        )
    except registry.UnknownAlgorithm as error:
        raise ConfigError(str(error)) from error


class TokenStats(Struct, frozen=True):
    """The tokens of some samples and their metrics, on the device where they were computed."""

    tokens: TokenBatch
    sampler_logprobs: Tensor
    call_index: Tensor
    metrics: dict[str, Tensor]
    entropies: Tensor


def compute_loss(
    objective: Objective, samples: Sequence[Sample], output: ForwardOutput, old_logprobs: OldLogprobs
) -> tuple[Tensor, TokenStats]:
    """Compute the loss of some samples of an update; the losses of all its micro-batches add up to its loss."""
    current = output.logprobs
    lengths = torch.tensor([len(sample.token_indices) for sample in samples], device=current.device)
    call = torch.arange(len(samples), device=current.device).repeat_interleave(lengths, output_size=len(current))
    advantages = _per_token([sample.advantage for sample in samples], call, current)
    sampler = torch.tensor(
        [lp for sample in samples for lp in sample.sampler_logprobs], device=current.device, dtype=current.dtype
    )
    proximal = current.detach() if old_logprobs.proximal is None else _to_tensor(old_logprobs.proximal, current)
    tokens = TokenBatch(current, proximal, advantages, call)
    loss, metrics = objective.loss(tokens, objective.hyperparameters)
    call_index = torch.tensor([sample.call_index for sample in samples], device=current.device)[call]
    if objective.correction is not None:
        if old_logprobs.ratios is not None:
            ratio = _per_token(old_logprobs.ratios, call, current)
        else:
            ratio = ratios(proximal - sampler, call if objective.level == "call" else None, objective.geometric)
        weight = objective.correction(ratio, objective.hyperparameters)
        loss = loss * weight
        metrics = metrics | {"corrected": weight != ratio}
    if objective.kl is not None and old_logprobs.reference is not None:
        distance = objective.kl(current, _to_tensor(old_logprobs.reference, current))
        loss = loss + objective.kl_weight * distance
        metrics = metrics | {"kl_reference": distance}
    if objective.entropy_weight:
        loss = loss - objective.entropy_weight * output.entropies
    metrics = {name: metric.detach() for name, metric in metrics.items()}
    stats = TokenStats(
        replace(tokens, current=current.detach()), sampler, call_index, metrics, output.entropies.detach()
    )
    return (loss * _per_token([sample.weight for sample in samples], call, current)).sum(), stats


def critic_loss(objective: Objective, samples: Sequence[Sample], values: Tensor, count: int) -> Tensor:
    """Compute the critic's loss of some samples of an update that has `count`."""
    targets = torch.tensor([sample.target for sample in samples], device=values.device, dtype=values.dtype)
    old_values = torch.tensor([sample.old_value for sample in samples], device=values.device, dtype=values.dtype)
    return value_loss(values, targets, old_values, objective.value_clip).sum() / count


def _to_tensor(logprobs: Sequence[Logprobs], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(logprobs)).to(like.device)


def _per_token(numbers: Sequence[float], call: Tensor, like: Tensor) -> Tensor:
    """Expand a number of each sample to its sampled tokens."""
    return torch.tensor(numbers, device=like.device, dtype=like.dtype)[call]


def value_loss(values: Tensor, targets: Tensor, old_values: Tensor, clip: float | None = None) -> Tensor:
    """L = (V - target)^2 / 2 for each state; the target is the credit's value of the call in it.

    With a clip, L is at least that of V moved to within `clip` of the old value, so that moving further gains nothing.
    """
    losses = 0.5 * (values - targets) ** 2
    if clip is None:
        return losses
    near = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum(losses, 0.5 * (near - targets) ** 2)
