"""Prepares the updates of a step: samples with advantages, and what the learner computes of them before the first."""

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec.structs import replace

from leyden.config import TrainingConfig
from leyden.learner.protocol import Learner, OldLogprobs, SampleEvaluation, Update
from leyden.learner.sample import Sample
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.orchestrator.credit.advantages import StepInputs, compute_advantages
from leyden.orchestrator.credit.branches import divide_groups
from leyden.orchestrator.credit.samples import Groups, StepAccounting, make_samples
from leyden.orchestrator.publications import Publications
from leyden.records import CallCredit
from leyden.rl.registry import Counted
from leyden.user_code.bridge import call_in_thread


class UpdateBuilder:
    """Builds the updates of one policy."""

    def __init__(
        self, learner: Learner, policy: str, algorithm: Algorithm, training: TrainingConfig, publications: Publications
    ) -> None:
        self._learner, self._policy, self._algorithm = learner, policy, algorithm
        self._publications = publications
        self._updates, self._epochs = training.updates_per_step, training.epochs

    async def prepare(self, groups: Groups, accounting: StepAccounting) -> list[Update]:
        """Divide groups evenly into updates, repeated in each epoch. Updates without samples are left out."""
        if not groups:
            return []
        self._count_stale(groups, accounting)
        parts = divide_groups(groups, self._updates)
        policy_changes = len(parts) * self._epochs > 1
        updates = [(await self._update(part, accounting, policy_changes))[0] for part in parts]
        return [update for update in updates if update.samples] * self._epochs

    async def prepare_part(self, groups: Groups, accounting: StepAccounting) -> tuple[Update, int]:
        """Prepare some groups of a step's only update, with weights that nothing is divided by yet.

        Return also the number of what the aggregation counts in them: the whole update is divided by the sum of these.
        """
        self._count_stale(groups, accounting)
        counted = StepAccounting()
        update, with_credit = await self._update(groups, counted, policy_changes=False)
        number = _count(with_credit, self._algorithm.divides_by)
        counted.scale_weights(number)
        accounting.add(counted)
        whole = [replace(sample, weight=number * sample.weight) for sample in update.samples]
        return replace(update, samples=whole), number

    async def _update(
        self, groups: Groups, accounting: StepAccounting, policy_changes: bool
    ) -> tuple[Update, Sequence[Sample]]:
        """Prepare one update; return also all samples that have credit.

        `policy_changes`: whether the step has other updates, so that old logprobs are kept.
        """
        all_samples = await asyncio.to_thread(make_samples, groups, self._publications.fresh)
        if not all_samples:  # every token is too old
            return Update([]), []
        evaluation = await self._learner.evaluate(self._policy, all_samples)
        credit = partial(self._credit, groups, all_samples, evaluation, accounting)
        with_credit, samples = await call_in_thread(credit)
        ratios = None
        if evaluation.ratios is not None:
            by_key = dict(zip(map(_key, all_samples), evaluation.ratios, strict=True))
            ratios = [by_key[_key(sample)] for sample in samples]
        proximal = reference = None
        if policy_changes:  # computed for the samples of the update, so that rounding is that of the update
            proximal = evaluation.logprobs if len(samples) == len(all_samples) else None
            if proximal is None:
                proximal = await self._learner.logprobs(self._policy, samples)
        if self._algorithm.kl_loss:
            reference = await self._learner.logprobs(self._policy, samples, reference=True)
        return Update(samples, OldLogprobs(proximal, reference, ratios)), with_credit

    def _count_stale(self, groups: Groups, accounting: StepAccounting) -> None:
        """Count the tokens that are too old, and the calls and rollouts that have no others."""
        for rollout in (rollout for group in groups for rollout in group):
            fresh: list[bool] = []
            for _, transition in rollout.transitions:
                call = transition.call
                tokens = self._publications.fresh(call, call.chosen)
                accounting.tokens_stale += len(call.chosen) - len(tokens)
                fresh.append(bool(tokens))
                if not tokens:
                    accounting.calls_excluded["too old"] += 1
                    accounting.credits.append(CallCredit(rollout.episode.attempt.id, call.id, excluded="too old"))
            if fresh and not any(fresh):
                accounting.trained -= 1
                accounting.excluded["too old"] += 1

    def _credit(
        self, groups: Groups, all_samples: Sequence[Sample], evaluation: SampleEvaluation, accounting: StepAccounting
    ) -> tuple[list[Sample], list[Sample]]:
        """Return all samples that have credit, with their advantages, and the part of them that is trained on."""
        inputs = StepInputs(self._penalties(all_samples, evaluation, accounting), evaluation.values)
        estimator = self._algorithm.advantage_estimator
        with_credit = compute_advantages(groups, all_samples, inputs, estimator, accounting)
        # Without an advantage a call has no gradient, unless something else gives it one.
        samples = [one for one in with_credit if one.advantage or self._algorithm.trains_every_call]
        accounting.credits += _credits(groups, all_samples, with_credit, samples)
        return with_credit, samples

    def _penalties(
        self, samples: Sequence[Sample], evaluation: SampleEvaluation, accounting: StepAccounting
    ) -> list[float] | None:
        """Return what is subtracted from the reward of each call for its KL divergence from the reference."""
        if evaluation.kl_reference is None:
            return None
        accounting.kl_reference += sum(evaluation.kl_reference)
        accounting.kl_tokens += sum(len(sample.sampler_logprobs) for sample in samples)
        return [self._algorithm.kl_penalty * distance for distance in evaluation.kl_reference]


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


def _count(samples: Sequence[Sample], what: Counted | None) -> int:
    """Count the rollouts, calls or tokens of samples, of which some may have no tokens."""
    lengths = [(sample.rollout, len(sample.token_indices)) for sample in samples if sample.token_indices]
    if what == "rollouts":
        return len({rollout for rollout, _ in lengths})
    return len(lengths) if what == "calls" else sum(tokens for _, tokens in lengths)


def _key(sample: Sample) -> tuple[int, int]:
    """Return what tells a sample of an update from the others."""
    return sample.rollout, sample.call_index
