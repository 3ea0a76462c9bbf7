"""Finished groups become rows to train on, and every rollout is accounted for: trained on, or left out and why."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from msgspec import Struct, field

from leyden.episodes import Episode, Transition
from leyden.outcomes import MEANING
from leyden.records import Call

POLICY = "policy"
"""What the policy under training is called in the record."""


class Sample(Struct, frozen=True, kw_only=True):
    """One call to train on: its tokens, how good it was, and what one of its tokens counts in the loss."""

    call: str
    rollout: int
    """Of which rollout it is, counted over those of an update."""
    turn: int
    """Which of its rollout's calls it is."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    chosen: Sequence[int]
    """The places in the completion whose tokens are trained on; the others are context."""
    sampler: tuple[float, ...]
    """Their logprobs when they were drawn, as the model had it, whatever a grammar made of that."""
    temperature: float
    advantage: float = 0.0
    weight: float = 0.0
    target: float = 0.0
    """What the critic should have said of it."""

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


class StepAccounting(Struct):
    """What became of the rollouts of a step; `asked` is the sum of `trained` and all of `excluded`."""

    asked: int = 0
    trained: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    """Rollouts that are not trained on, by why."""
    calls_trained: int = 0
    calls_left: Counter[str] = field(default_factory=Counter)
    """Calls that are not trained on, by why."""
    groups: int = 0
    groups_dropped: int = 0
    groups_single: int = 0
    """Groups of one rollout, which has nobody to be compared with."""
    groups_flat: int = 0
    """Groups whose calls all have the same value: comparing them says nothing."""
    states_shared: list[float] = field(default_factory=list)
    """The share of calls with another in the same state, in each update, where the advantage asks for states."""
    kl_reference: list[float] = field(default_factory=list)
    """How far a token is from the reference, in each update, where the reward is less for it."""
    critic_explained: list[float] = field(default_factory=list)
    """The share of the variance of what calls are worth that the critic foresaw, in each update, where there is one."""


class SelectedRollout(Struct, frozen=True):
    """A rollout that counts: what it is worth in the end, and why each call is not trained on, None where it is."""

    episode: Episode
    final: float
    left_out: tuple[str | None, ...]

    @property
    def transitions(self) -> Iterator[tuple[int, Transition]]:
        """The transitions to train on, each with its index in the episode."""
        return ((n, one) for n, one in enumerate(self.episode.transitions) if self.left_out[n] is None)


class SampleFilter(Struct, frozen=True):
    """Which rollouts and calls are trained on."""

    min_group: int
    failure_reward: float
    roles: Collection[str] | None
    """None: all."""
    allow_biased_sampling: bool = False
    """Whether calls that were not drawn fairly are."""
    policy: str = POLICY
    """Whose calls are."""


def score(group: Sequence[Episode], admission: SampleFilter, accounts: StepAccounting) -> list[SelectedRollout] | None:
    """The rollouts of a group that can be trained on; None where they are too few, and the group is dropped."""
    counted: list[SelectedRollout] = []
    reasons: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for episode in group:
        outcome = episode.attempt.outcome
        assert outcome is not None, "a finished group has finished attempts"
        accounts.outcomes[str(outcome.ending)] += 1
        final = episode.final_reward(admission.failure_reward)
        if not MEANING[outcome.ending].counted or final is None:
            reasons[str(outcome.ending)] += 1
            continue
        left_out = tuple(
            episode.exclusion_reason(call, admission.roles, admission.allow_biased_sampling, admission.policy)
            for call in episode.calls
        )
        left.update(why for why in left_out if why is not None)
        if None in left_out:
            counted.append(SelectedRollout(episode, final, left_out))
        else:
            reasons["no call to train on"] += 1
    accounts.asked += len(group)
    accounts.groups += 1
    accounts.excluded += reasons
    accounts.calls_left += left
    if len(counted) < admission.min_group:
        accounts.groups_dropped += 1
        if counted:
            accounts.excluded["group too small"] += len(counted)
        return None
    accounts.trained += len(counted)
    return counted


def lay_out(groups: Sequence[Sequence[SelectedRollout]]) -> list[Sample]:
    """The rows of an update, before anybody knows what they are worth: group by group, rollout by rollout."""
    rollouts = enumerate(scored for group in groups for scored in group)
    return [_row(one, number, turn) for number, scored in rollouts for turn, one in scored.transitions]


def _row(transition: Transition, rollout: int, turn: int) -> Sample:
    call = transition.call
    assert call.logprobs is not None, "a call without logprobs is not selected"
    return Sample(
        call=call.id,
        rollout=rollout,
        turn=turn,
        prompt_ids=transition.prompt_ids,
        completion_ids=transition.completion_ids,
        chosen=call.chosen,
        sampler=_sampler(call.logprobs, call),
        temperature=call.sampling.temperature,
    )


def _sampler(drawn: tuple[float, ...], call: Call) -> tuple[float, ...]:
    if call.allowed is None:
        return drawn
    return tuple(drawn[place] + math.log(call.allowed[place]) for place in call.chosen)
