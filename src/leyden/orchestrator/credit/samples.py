"""Turns finished groups into samples to train on. Every rollout is accounted for: trained on, or excluded and why."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from leyden.episodes import Episode, Transition
from leyden.learner.sample import Sample
from leyden.orchestrator.credit.own_rewards import NO_FOREIGN_REWARDS, ForeignRewards
from leyden.outcomes import MEANING
from leyden.records import DEFAULT_POLICY, Call, CallCredit
from leyden.rl.situation import Situation

REWARDED_OTHERS, CALLED_OTHERS = "rewarded for other policies only", "only calls of other policies"
"""Why a rollout is nothing to learn from for one of several policies."""


class SituatedAdvantage(NamedTuple):
    """The advantage of one call, and where it was made."""

    group: str
    situation: Situation
    advantage: float


class StepAccounting(Struct):
    """Counts the rollouts of a step; `requested` is the sum of `trained` and all of `excluded`."""

    requested: int = 0
    trained: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    """Rollouts that are not trained on, by reason."""
    calls_trained: int = 0
    calls_excluded: Counter[str] = field(default_factory=Counter)
    """Calls that are not trained on, by reason."""
    groups: int = 0
    groups_dropped: int = 0
    groups_single: int = 0
    """Groups of one rollout, which has nothing to be compared with."""
    groups_flat: int = 0
    """Groups whose calls all have the same value, and so no gradient."""
    states_shared: list[float] = field(default_factory=list)
    """For each update, the share of calls with another in the same state, if the advantage reads states."""
    kl_reference: float = 0.0
    """The KL divergence from the reference, summed over tokens, if the reward is penalised for it."""
    kl_tokens: int = 0
    """The tokens of that sum; 0 if the reward is not penalised."""
    critic_explained: list[float] = field(default_factory=list)
    """For each update, the share of the variance of the calls' values that the critic explains, if there is one."""
    advantages: list[SituatedAdvantage] = field(default_factory=list)
    """Of all calls with credit."""
    credits: list[CallCredit] = field(default_factory=list)
    """What the step computed for each call of this policy, or why the call was left out."""
    tokens_stale: int = 0
    """Tokens that are not trained on because they were sampled too many publications ago."""

    def scale_weights(self, factor: float) -> None:
        """Multiply the weights of all calls in the loss."""
        self.credits = [
            replace(credit, weight=factor * credit.weight) if credit.weight is not None else credit
            for credit in self.credits
        ]

    def add(self, other: "StepAccounting") -> None:
        """Add what another one has counted."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class SelectedRollout(Struct, frozen=True):
    """A rollout that counts in its group: its final reward, and for each call why it is excluded, or None.

    A rollout without a call to train on counts in the group's statistics too: it has a reward.
    """

    episode: Episode
    final: float
    exclusion_reasons: tuple[str | None, ...]

    @property
    def transitions(self) -> Iterator[tuple[int, Transition]]:
        """The transitions to train on, each with its index in the episode."""
        return ((n, one) for n, one in enumerate(self.episode.transitions) if self.exclusion_reasons[n] is None)


Groups = Sequence[Sequence[SelectedRollout]]
Fresh = Callable[[Call, Sequence[int]], Sequence[int]]
"""From a call and some of its completion's tokens to those that may still be trained on."""


class SampleFilter(Struct, frozen=True):
    """Selects the rollouts and calls that are trained on."""

    min_group: int
    failure_reward: float
    roles: Collection[str] | None
    """None: all roles."""
    allow_biased_sampling: bool = False
    """Whether to train on calls sampled greedily, with truncation or with penalties."""
    policy: str = DEFAULT_POLICY
    """The policy whose calls are trained on."""
    foreign: ForeignRewards = NO_FOREIGN_REWARDS
    """The rewards that count for other policies of the run."""

    def exclusion_reasons(self, episode: Episode) -> tuple[str | None, ...]:
        """Return for each call of an episode why it is not trained on, or None if it is."""
        return tuple(
            episode.exclusion_reason(call, self.roles, self.allow_biased_sampling, self.policy)
            for call in episode.calls
        )


def select_rollouts(
    group: Sequence[Episode], sample_filter: SampleFilter, accounting: StepAccounting
) -> list[SelectedRollout] | None:
    """Select the rollouts of a group that count; None if the group is dropped.

    That is if they are fewer than `min_group`, or none has a call to train on.
    """
    selected: list[SelectedRollout] = []
    excluded, trained_before = accounting.excluded, accounting.trained

    def exclude_calls(episode: Episode, reasons: Iterable[str | None]) -> None:
        accounting.credits += [
            CallCredit(episode.attempt.id, call.id, excluded=reason)
            for call, reason in zip(episode.calls, reasons, strict=True)
            if reason is not None and call.policy == sample_filter.policy
        ]

    for whole in group:
        episode = sample_filter.foreign.without(whole)
        outcome = episode.attempt.outcome
        assert outcome is not None, "a finished group has finished attempts"
        accounting.outcomes[str(outcome.ending)] += 1
        final = episode.final_reward(sample_filter.failure_reward)
        if not MEANING[outcome.ending].counted or final is None:
            others = whole.final_reward(sample_filter.failure_reward) is not None
            excluded[REWARDED_OTHERS if others else str(outcome.ending)] += 1
            why = REWARDED_OTHERS if others else f"rollout ended as {outcome.ending}"
            exclude_calls(episode, [why] * len(episode.calls))
            continue
        if episode.left_origin:
            excluded["diverged"] += 1
            exclude_calls(episode, ["diverged from the record"] * len(episode.calls))
            continue
        reasons = sample_filter.exclusion_reasons(episode)
        accounting.calls_excluded.update(reason for reason in reasons if reason is not None)
        exclude_calls(episode, reasons)
        selected.append(SelectedRollout(episode, final, reasons))
        if None in reasons:
            accounting.trained += 1
        else:
            others = sample_filter.foreign.policies.issuperset(call.policy for call in episode.calls)
            excluded[CALLED_OTHERS if others and episode.calls else "no call to train on"] += 1
    accounting.requested += len(group)
    accounting.groups += 1
    if len(selected) < sample_filter.min_group or accounting.trained == trained_before:
        accounting.groups_dropped += 1
        leave_out(selected, "group too small", accounting)
        return None
    return selected


def leave_out(group: Sequence[SelectedRollout], reason: str, accounting: StepAccounting) -> None:
    """Count the rollouts of a group that would be trained on as left out, and their calls."""
    if trained := [rollout for rollout in group if None in rollout.exclusion_reasons]:
        accounting.trained -= len(trained)
        accounting.excluded[reason] += len(trained)
    accounting.credits += [
        CallCredit(rollout.episode.attempt.id, transition.call.id, excluded=reason)
        for rollout in trained
        for _, transition in rollout.transitions
    ]


def make_samples(groups: Groups, fresh: Fresh = lambda call, tokens: tokens) -> list[Sample]:
    """Build the samples of an update, without advantages: group by group, rollout by rollout.

    A call without a token that is `fresh` gives none.
    """
    rollouts = enumerate(rollout for group in groups for rollout in group)
    return [
        _sample(one, number, index, tokens)
        for number, rollout in rollouts
        for index, one in rollout.transitions
        if (tokens := fresh(one.call, one.call.chosen))
    ]


def _sample(transition: Transition, rollout: int, call_index: int, tokens: Sequence[int]) -> Sample:
    call = transition.call
    assert call.logprobs is not None, "a call without logprobs is not selected"
    return Sample(
        call=call.id,
        rollout=rollout,
        call_index=call_index,
        prompt_ids=transition.prompt_ids,
        completion_ids=transition.completion_ids,
        token_indices=tokens,
        sampler_logprobs=_sampler_logprobs(call.logprobs, call, tokens),
        temperature=call.sampling.temperature or 1.0,  # of greedy calls engines report logprobs at temperature 1
    )


def _sampler_logprobs(logprobs: tuple[float, ...], call: Call, tokens: Sequence[int]) -> tuple[float, ...]:
    if call.allowed is None:
        return tuple(logprobs[index] for index in tokens)
    return tuple(logprobs[index] + math.log(call.allowed[index]) for index in tokens)
