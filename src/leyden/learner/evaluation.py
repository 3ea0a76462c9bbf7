"""What is computed of samples before the first update of a step, from the weights at its start."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from leyden.learner.objective import Objective
from leyden.learner.policy import Policy
from leyden.learner.protocol import Logprobs, SampleEvaluation
from leyden.learner.sample import Sample
from leyden.rl.correction import ratios
from leyden.rl.divergence import Estimate, k3


def evaluate(policy: Policy, objective: Objective, samples: Sequence[Sample]) -> SampleEvaluation:
    """Compute what credit and objective read, and nothing else."""
    by_rollout = objective.correction is not None and objective.level == "rollout"
    found = policy.evaluate(samples) if policy.critic is not None or by_rollout else None
    return SampleEvaluation(
        logprobs=None if found is None else to_arrays(found.logprobs),
        values=None if found is None or policy.critic is None else found.values,
        kl_reference=None if objective.penalty is None else _kl_reference(samples, policy, objective.penalty),
        ratios=_ratios(samples, found.logprobs, objective.geometric) if found is not None and by_rollout else None,
    )


def divergence(policy: Policy, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> float:
    """Estimate KL(start || policy) from what the start sampled."""
    return divergence_of(to_arrays(policy.logprobs(samples)), logprobs)


def divergence_of(found: Sequence[Logprobs], start: Sequence[Sequence[float]]) -> float:
    """Estimate a KL divergence by k3, from logprobs under the policy and when tokens were sampled: their mean."""
    now = torch.from_numpy(np.concatenate(found)).double()
    return k3(torch.tensor([one for some in start for one in some]).to(now), now).mean().item()


def to_arrays(logprobs: Sequence[Tensor]) -> list[Logprobs]:
    """Copy the logprobs of samples from the device, in one transfer."""
    if not logprobs:
        return []
    ends = np.cumsum([len(one) for one in logprobs])
    return np.split(torch.cat(list(logprobs)).cpu().numpy(), ends[:-1])


def _kl_reference(samples: Sequence[Sample], policy: Policy, estimate: Estimate) -> list[float]:
    found = policy.reference_logprobs(samples)
    if not samples:
        return []
    reference = torch.cat(found)
    by_call = estimate(_sampler_logprobs(samples, reference), reference).split(
        [len(sample.sampler_logprobs) for sample in samples]
    )
    return torch.stack([distance.sum() for distance in by_call]).tolist()  # one transfer from the device for all


def rollout_ratios(samples: Sequence[Sample], logprobs: Sequence[Logprobs], geometric: bool) -> list[float]:
    """Compute the ratio of the policy to the sampler over each sample's whole rollout, from logprobs."""
    return _ratios(samples, [torch.from_numpy(one) for one in logprobs], geometric)


def _ratios(samples: Sequence[Sample], logprobs: Sequence[Tensor], geometric: bool) -> list[float]:
    """Compute the ratio of the policy to the sampler over each sample's whole rollout."""
    if not samples:
        return []
    found = torch.cat(list(logprobs))
    rollout = torch.tensor([one.rollout for one in samples for _ in one.sampler_logprobs], device=found.device)
    ratios_T = ratios(found - _sampler_logprobs(samples, found), rollout, geometric)
    ratios_R = torch.zeros(max(sample.rollout for sample in samples) + 1).to(ratios_T).index_copy(0, rollout, ratios_T)
    by_rollout: list[float] = ratios_R.tolist()
    return [by_rollout[sample.rollout] for sample in samples]


def _sampler_logprobs(samples: Sequence[Sample], like: Tensor) -> Tensor:
    """Return the logprobs of the samples' tokens when they were sampled, sample after sample."""
    flat = [logprob for sample in samples for logprob in sample.sampler_logprobs]
    return torch.tensor(flat, device=like.device, dtype=like.dtype)
