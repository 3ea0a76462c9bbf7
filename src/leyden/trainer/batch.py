"""Finished groups become rows to train on, and every rollout is accounted for: trained on, or left out and why."""

from collections import Counter
from collections.abc import Collection, Sequence

from msgspec import Struct, field

from leyden.episodes import Episode
from leyden.outcomes import MEANING
from leyden.records import Call
from leyden.rl.advantage import Advantage, call_weights
from leyden.rl.aggregation import Aggregation
from leyden.rl.credit import Credit, Earned


class Row(Struct, frozen=True):
    """One call to train on: its tokens, how good it was, and what one of its tokens counts in the loss."""

    call: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler: tuple[float, ...]
    """The logprobs with which the completion was drawn."""
    temperature: float
    advantage: float
    weight: float

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)


class Accounts(Struct):
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
    groups_flat: int = 0
    """Groups whose rollouts are all worth the same: nothing is to be learnt from them."""


class Scored(Struct, frozen=True):
    """A rollout that counts, its calls that may be trained on, and the value of each."""

    episode: Episode
    calls: tuple[Call, ...]
    values: tuple[float, ...]


class Rules(Struct, frozen=True):
    """How a run goes from rewards to rows."""

    credit: Credit
    advantage: Advantage
    aggregation: Aggregation
    level: str
    min_group: int
    failure_reward: float
    roles: Collection[str] | None


def score(group: Sequence[Episode], rules: Rules, accounts: Accounts) -> list[Scored] | None:
    """The rollouts of a group that can be trained on; None where they are too few, and the group is dropped."""
    counted: list[Scored] = []
    reasons: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for episode in group:
        outcome = episode.attempt.outcome
        assert outcome is not None, "a finished group has finished attempts"
        accounts.outcomes[str(outcome.ending)] += 1
        final = episode.final_reward(rules.failure_reward)
        if not MEANING[outcome.ending].counted or final is None:
            reasons[str(outcome.ending)] += 1
            continue
        chosen = [episode.left_out(call, rules.roles) for call in episode.calls]
        left.update(why for why in chosen if why is not None)
        values = rules.credit(_earned(episode, final, chosen))
        calls = tuple(call for call, why in zip(episode.calls, chosen, strict=True) if why is None)
        if calls:
            kept = tuple(value for value, why in zip(values, chosen, strict=True) if why is None)
            counted.append(Scored(episode, calls, kept))
        else:
            reasons["no call to train on"] += 1
    accounts.asked += len(group)
    accounts.groups += 1
    accounts.excluded += reasons
    accounts.calls_left += left
    if len(counted) < rules.min_group:
        accounts.groups_dropped += 1
        if counted:
            accounts.excluded["group too small"] += len(counted)
        return None
    accounts.trained += len(counted)
    accounts.calls_trained += sum(len(scored.calls) for scored in counted)
    return counted


def make_rows(groups: Sequence[Sequence[Scored]], rules: Rules, accounts: Accounts) -> list[Row]:
    """The rows of one optimiser update. Rollouts of a group are compared with each other and with nobody else."""
    tokens = [[len(call.completion_ids) for call in scored.calls] for group in groups for scored in group]
    weights = iter(rules.aggregation(tokens))
    rows: list[Row] = []
    for group in groups:
        shares = call_weights([len(scored.calls) for scored in group], rules.level)
        advantages = rules.advantage([scored.values for scored in group], shares)
        accounts.groups_flat += not any(advantage for calls in advantages for advantage in calls)
        for scored, advantages_C in zip(group, advantages, strict=True):
            weights_C = next(weights)
            for call, advantage, weight in zip(scored.calls, advantages_C, weights_C, strict=True):
                if advantage:  # without one a call has no gradient
                    rows.append(_row(scored.episode, call, advantage, weight))
    return rows


def _earned(episode: Episode, final: float, chosen: Sequence[str | None]) -> Earned:
    return Earned(
        steps=tuple(episode.earned[call.id] for call in episode.calls),
        final=final,
        selected=tuple(why is None for why in chosen),
    )


def _row(episode: Episode, call: Call, advantage: float, weight: float) -> Row:
    assert call.logprobs is not None, "a call without logprobs is not selected"
    return Row(
        call=call.id,
        prompt_ids=episode.prompt_ids(call),
        completion_ids=call.completion_ids,
        sampler=call.logprobs,
        temperature=call.sampling.temperature,
        advantage=advantage,
        weight=weight,
    )
