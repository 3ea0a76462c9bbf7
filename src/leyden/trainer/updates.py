"""The updates of a step, made ready: whose rows, what they are worth, and what was known of them before the first."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from msgspec import Struct
from torch import Tensor

from leyden.rl.correction import ratios
from leyden.trainer.algorithm.resolve import Algorithm, KlPenalty
from leyden.trainer.batch.advantages import StepInputs, value
from leyden.trainer.batch.samples import Sample, SelectedRollout, StepAccounting, lay_out
from leyden.trainer.policy.objective import OldLogprobs
from leyden.trainer.policy.policy import Policy

Groups = Sequence[Sequence[SelectedRollout]]


class Update(Struct, frozen=True):
    """Rows to move the weights by, once."""

    rows: list[Sample]
    before: OldLogprobs


def prepare(
    groups: Groups, number: int, policy: Policy, algorithm: Algorithm, accounts: StepAccounting
) -> list[Update]:
    """Divide groups evenly into so many updates. Those that nothing is to be learnt from are left out."""
    number = min(number, len(groups))
    ends = [len(groups) * done // number for done in range(number + 1)]
    parts = [groups[start:end] for start, end in pairwise(ends)]
    updates = [_update(part, policy, algorithm, accounts, moves=len(parts) > 1) for part in parts]
    return [update for update in updates if update.rows]


def _update(groups: Groups, policy: Policy, algorithm: Algorithm, accounts: StepAccounting, moves: bool) -> Update:
    """One update; `moves` says whether the policy will have moved before it."""
    laid, objective = lay_out(groups), algorithm.objective
    known = StepInputs(
        penalties=_penalties(laid, policy, algorithm.penalty, accounts) if algorithm.penalty is not None else None,
        values=policy.values(laid) if algorithm.critic else None,
    )
    valued = value(groups, laid, known, algorithm.valuation, accounts)
    # Without an advantage a call has no gradient, unless something else gives it one.
    rows = [row for row in valued if row.advantage or algorithm.critic or objective.needs_all]
    whole = objective.correction is not None and objective.level == "rollout"
    ratios_R = _ratios(laid, policy.logprobs(laid)) if whole else None
    before = OldLogprobs(
        proximal=policy.logprobs(rows) if moves else None,
        reference=policy.reference_logprobs(rows) if objective.kl is not None else None,
        corrections=None if ratios_R is None else [ratios_R[row.rollout].expand(len(row.sampler)) for row in rows],
    )
    return Update(rows, before)


def _penalties(rows: Sequence[Sample], policy: Policy, penalty: KlPenalty, accounts: StepAccounting) -> list[float]:
    """What the distance to the reference takes from the reward of each call."""
    reference = policy.reference_logprobs(rows)
    distances = [
        penalty.estimate(_sampler(row, known), known).sum().item() for row, known in zip(rows, reference, strict=True)
    ]
    accounts.kl_reference.append(sum(distances) / sum(len(row.sampler) for row in rows))
    return [penalty.weight * distance for distance in distances]


def _ratios(rows: Sequence[Sample], proximal: Sequence[Tensor]) -> Tensor:
    """The ratio of the proximal policy to the sampler over each whole rollout."""
    gaps = [known - _sampler(row, known) for row, known in zip(rows, proximal, strict=True)]
    gap_C = torch.stack([gap.sum() for gap in gaps])
    rollout = torch.tensor([row.rollout for row in rows], device=gap_C.device)
    gap_R = gap_C.new_zeros(max(row.rollout for row in rows) + 1).index_add(0, rollout, gap_C)
    return ratios(gap_R)


def _sampler(row: Sample, like: Tensor) -> Tensor:
    return torch.tensor(row.sampler, device=like.device, dtype=like.dtype)
