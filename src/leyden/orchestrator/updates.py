"""Prepares the updates of a step: samples with advantages, and everything that must be computed before the first."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from msgspec import Struct
from torch import Tensor

from leyden.learner.objective import OldLogprobs
from leyden.learner.policy import Policy
from leyden.learner.sample import Sample
from leyden.orchestrator.algorithm.resolve import Algorithm, KlPenalty
from leyden.orchestrator.credit.advantages import StepInputs, compute_advantages
from leyden.orchestrator.credit.samples import SelectedRollout, StepAccounting, make_samples
from leyden.records import CallCredit
from leyden.rl.correction import ratios

Groups = Sequence[Sequence[SelectedRollout]]


class Update(Struct, frozen=True):
    """The samples of one optimiser update."""

    samples: list[Sample]
    old_logprobs: OldLogprobs


def prepare_updates(
    groups: Groups, number: int, policy: Policy, algorithm: Algorithm, accounting: StepAccounting, epochs: int = 1
) -> list[Update]:
    """Divide groups evenly into so many updates, repeated in each epoch. Updates without samples are left out."""
    number = min(number, len(groups))
    ends = [len(groups) * done // number for done in range(number + 1)]
    parts = [groups[start:end] for start, end in pairwise(ends)]
    policy_changes = len(parts) * epochs > 1
    updates = [_update(part, policy, algorithm, accounting, policy_changes) for part in parts]
    return [update for update in updates if update.samples] * epochs


def _update(
    groups: Groups, policy: Policy, algorithm: Algorithm, accounting: StepAccounting, policy_changes: bool
) -> Update:
    """Prepare one update; `policy_changes`: whether the step has other updates, so that old logprobs must be kept."""
    all_samples, objective, penalty = make_samples(groups), algorithm.objective, algorithm.kl_penalty
    by_rollout = objective.correction is not None and objective.level == "rollout"
    evaluation = policy.evaluate(all_samples) if algorithm.critic or by_rollout else None
    inputs = StepInputs(
        penalties=None if penalty is None else _penalties(all_samples, policy, penalty, accounting),
        values=evaluation.values if evaluation is not None and algorithm.critic else None,
    )
    with_credit = compute_advantages(groups, all_samples, inputs, algorithm.advantage_estimator, accounting)
    # Without an advantage a call has no gradient, unless something else gives it one.
    samples = [sample for sample in with_credit if sample.advantage or algorithm.critic or objective.needs_all]
    accounting.credits += _credits(groups, all_samples, with_credit, samples)
    ratios_R = None
    if evaluation is not None and by_rollout:
        ratios_R = _ratios(all_samples, evaluation.logprobs, objective.geometric)
    proximal = None
    if policy_changes:  # computed for the samples of the update, so that rounding is that of the update
        same = [*map(_key, samples)] == [*map(_key, all_samples)]
        proximal = evaluation.logprobs if evaluation is not None and same else policy.logprobs(samples)
    old_logprobs = OldLogprobs(
        proximal=proximal,
        reference=policy.reference_logprobs(samples) if objective.kl is not None else None,
        ratios=None
        if ratios_R is None
        else [ratios_R[sample.rollout].expand(len(sample.sampler_logprobs)) for sample in samples],
    )
    return Update(samples, old_logprobs)


def _credits(
    groups: Groups, samples: Sequence[Sample], with_credit: Sequence[Sample], trained: Sequence[Sample]
) -> Iterator[CallCredit]:
    """Yield what was computed for each sample, or why it is left out."""
    attempts = [rollout.episode.attempt.id for group in groups for rollout in group]
    known = {_key(sample): sample for sample in with_credit}
    kept = set(map(_key, trained))
    for sample in samples:
        attempt, key = attempts[sample.rollout], _key(sample)
        if (found := known.get(key)) is None:
            yield CallCredit(attempt, sample.call, excluded="no credit")
            continue
        tokens, excluded = (len(found.token_indices), "") if key in kept else (0, "its advantage is 0")
        yield CallCredit(attempt, found.call, found.target, found.advantage, found.weight, tokens, excluded)


def _key(sample: Sample) -> tuple[int, int]:
    """Return what tells a sample of an update from the others."""
    return sample.rollout, sample.call_index


def _penalties(
    samples: Sequence[Sample], policy: Policy, penalty: KlPenalty, accounting: StepAccounting
) -> list[float]:
    """Compute what is subtracted from the reward of each call for its KL divergence from the reference."""
    reference = torch.cat(policy.reference_logprobs(samples))
    lengths = [len(sample.sampler_logprobs) for sample in samples]
    by_call = penalty.estimate(_sampler_logprobs(samples, reference), reference).split(lengths)
    distances = torch.stack([distance.sum() for distance in by_call]).tolist()  # one transfer from the device for all
    accounting.kl_reference.append(sum(distances) / sum(lengths))
    return [penalty.weight * distance for distance in distances]


def _ratios(samples: Sequence[Sample], proximal: Sequence[Tensor], geometric: bool) -> Tensor:
    """Compute the ratio of the proximal policy to the sampler over each sample's whole rollout."""
    logprobs = torch.cat(list(proximal))
    rollout = torch.tensor([one.rollout for one in samples for _ in one.sampler_logprobs], device=logprobs.device)
    ratios_T = ratios(logprobs - _sampler_logprobs(samples, logprobs), rollout, geometric)
    return torch.zeros(max(sample.rollout for sample in samples) + 1).to(ratios_T).index_copy(0, rollout, ratios_T)


def _sampler_logprobs(samples: Sequence[Sample], like: Tensor) -> Tensor:
    """Return the logprobs of the samples' tokens when they were sampled, sample after sample."""
    flat = [logprob for sample in samples for logprob in sample.sampler_logprobs]
    return torch.tensor(flat, device=like.device, dtype=like.dtype)
