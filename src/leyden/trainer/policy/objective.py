"""What an update makes smaller: the loss of every sampled token, weighted, and what is added to it."""

from collections.abc import Sequence

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.correction import Correction, Level, ratios
from leyden.rl.kl import Estimate
from leyden.rl.loss import Loss, TokenBatch
from leyden.rl.value_loss import value_loss
from leyden.trainer.batch.samples import Sample
from leyden.trainer.policy.forward import ForwardOutput


class Objective(Struct, frozen=True):
    """Loss, correction, and the weights of what is added."""

    loss: Loss
    hyperparameters: Hyperparameters
    correction: Correction | None = None
    level: Level = "token"
    kl: Estimate | None = None
    """The distance to the reference that is part of the loss; None: none is."""
    kl_weight: float = 0.0
    entropy_weight: float = 0.0

    @property
    def needs_all(self) -> bool:
        """Whether calls without an advantage have a gradient too."""
        return self.kl is not None or self.entropy_weight > 0


class OldLogprobs(Struct, frozen=True):
    """What was known of each row when the step began, a tensor a row."""

    proximal: Sequence[Tensor] | None = None
    """None: the policy has not moved since."""
    reference: Sequence[Tensor] | None = None
    corrections: Sequence[Tensor] | None = None
    """The ratio of the proximal policy to the sampler, where it is that of a whole rollout."""

    def of(self, rows: Sequence[int]) -> "OldLogprobs":
        """What was known of some rows, by index."""
        known = (self.proximal, self.reference, self.corrections)
        return OldLogprobs(*(None if one is None else [one[index] for index in rows] for one in known))


class TokenStats(Struct, frozen=True):
    """What is worth counting of some rows, on whatever device it was computed."""

    tokens: TokenBatch
    sampler: Tensor
    turn: Tensor
    figures: dict[str, Tensor]
    entropies: Tensor


def total(
    objective: Objective, rows: Sequence[Sample], read: ForwardOutput, before: OldLogprobs
) -> tuple[Tensor, TokenStats]:
    """The loss of some rows of an update; those of all its rows add up to its loss."""
    current = read.logprobs
    lengths = torch.tensor([len(row.chosen) for row in rows], device=current.device)
    call = torch.arange(len(rows), device=current.device).repeat_interleave(lengths)
    advantages = _spread([row.advantage for row in rows], call, current)
    sampler = torch.tensor([lp for row in rows for lp in row.sampler], device=current.device, dtype=current.dtype)
    proximal = current.detach() if before.proximal is None else torch.cat(list(before.proximal))
    tokens = TokenBatch(current, proximal, advantages, call)
    loss, figures = objective.loss(tokens, objective.hyperparameters)
    turn = torch.tensor([row.turn for row in rows], device=current.device)[call]
    if objective.correction is not None:
        if before.corrections is not None:
            ratio = torch.cat(list(before.corrections))
        else:
            ratio = ratios(proximal - sampler, call if objective.level == "call" else None)
        weight = objective.correction(ratio, objective.hyperparameters)
        loss = loss * weight
        figures = figures | {"corrected": weight != ratio}
    if objective.kl is not None and before.reference is not None:
        distance = objective.kl(current, torch.cat(list(before.reference)))
        loss = loss + objective.kl_weight * distance
        figures = figures | {"kl_reference": distance}
    if objective.entropy_weight:
        loss = loss - objective.entropy_weight * read.entropies
    seen = TokenStats(
        replace(tokens, current=current.detach()), sampler, turn, _detached(figures), read.entropies.detach()
    )
    return (loss * _spread([row.weight for row in rows], call, current)).sum(), seen


def critic_loss(rows: Sequence[Sample], values: Tensor, count: int) -> Tensor:
    """The critic's part, of some rows of an update that has so many."""
    targets = torch.tensor([row.target for row in rows], device=values.device, dtype=values.dtype)
    return value_loss(values, targets).sum() / count


def _detached(figures: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: figure.detach() for name, figure in figures.items()}


def _spread(numbers: Sequence[float], call: Tensor, like: Tensor) -> Tensor:
    """A number of each row, for each of its sampled tokens."""
    return torch.tensor(numbers, device=like.device, dtype=like.dtype)[call]
