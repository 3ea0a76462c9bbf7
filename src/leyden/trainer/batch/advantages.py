"""What each row of an update is worth: from rewards by credit to advantages, and its share in the loss."""

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from leyden.config import Hyperparameters
from leyden.rl import advantage as advantages
from leyden.rl.advantage import Advantage, CallBatch, Ints
from leyden.rl.aggregation import Aggregation
from leyden.rl.credit import Credit, RolloutRewards
from leyden.rl.state import StateKey, numbered, shared
from leyden.trainer.batch.samples import Sample, SelectedRollout, StepAccounting


class AdvantageEstimator(Struct, frozen=True):
    """How a run goes from rewards to advantages."""

    credit: Credit
    advantage: Advantage
    aggregation: Aggregation
    hyperparameters: Hyperparameters
    level: Literal["rollout", "transition"]
    state: StateKey | None
    """By what the states of calls are told apart, where the advantage asks."""
    normalize_by: str | None
    """A key of the task's input: global normalisation is done within each of its values."""


class StepInputs(Struct, frozen=True):
    """What models say of the rows of an update before it begins, one entry a row."""

    penalties: Sequence[float] | None = None
    """What is taken from the reward of a call for its distance to the reference."""
    values: Sequence[float] | None = None
    """What the critic makes of the state before it."""


def value(
    groups: Sequence[Sequence[SelectedRollout]],
    rows: Sequence[Sample],
    known: StepInputs,
    rules: AdvantageEstimator,
    accounts: StepAccounting,
) -> list[Sample]:
    """The rows that get credit, with what they are worth. `rows` are those of `groups`, in their order."""
    scored = [one for group in groups for one in group]
    rows_R: list[list[int]] = [[] for _ in scored]
    for index, row in enumerate(rows):
        rows_R[row.rollout].append(index)
    earned = [_earned(one, rows, indices, known) for one, indices in zip(scored, rows_R, strict=True)]
    credit = [rules.credit(one, rules.hyperparameters) for one in earned]
    worth = {
        index: found
        for values, indices in zip(credit, rows_R, strict=True)
        for index in indices
        if (found := values[rows[index].turn]) is not None
    }
    accounts.calls_trained += len(worth)
    if missing := len(rows) - len(worth):
        accounts.calls_left["no credit"] += missing
    rollout = np.array([rows[index].rollout for index in worth], dtype=np.int64)
    group_R = np.array([number for number, group in enumerate(groups) for _ in group], dtype=np.int64)
    calls = CallBatch(
        value=np.array(list(worth.values()), dtype=np.float64),
        weight=advantages.weights(rollout, rules.level),
        group=group_R[rollout],
        rollout=rollout,
        part=numbered([0] * len(scored), [_part(one, rules.normalize_by) for one in scored])[rollout],
        returns=np.array([one.total for one in earned])[rollout],
        baseline=np.array([known.values[index] if known.values else 0.0 for index in worth]),
        state=_states(scored, [rows[index] for index in worth], group_R, rules),
    )
    compared = advantages.groups(calls)
    accounts.groups_single += compared.alone
    accounts.groups_flat += compared.flat
    if rules.state is not None:
        accounts.states_shared.append(shared(calls.state))
    if known.values is not None and (variance := calls.value.var()) > 0:
        accounts.critic_explained.append(float(1 - (calls.value - calls.baseline).var() / variance))
    tokens = [[len(rows[index].chosen) for index in indices if index in worth] for indices in rows_R]
    weights = (weight for weights_C in rules.aggregation(tokens, rules.hyperparameters) for weight in weights_C)
    return [
        replace(rows[index], advantage=float(advantage), weight=weight, target=target)
        for (index, target), advantage, weight in zip(
            worth.items(), rules.advantage(calls, rules.hyperparameters), weights, strict=True
        )
    ]


def _earned(
    scored: SelectedRollout, rows: Sequence[Sample], indices: Sequence[int], known: StepInputs
) -> RolloutRewards:
    steps = [transition.reward for transition in scored.episode.transitions]
    critic = [0.0] * len(steps)
    for index in indices:
        if known.penalties is not None:
            steps[rows[index].turn] -= known.penalties[index]
        if known.values is not None:
            critic[rows[index].turn] = known.values[index]
    selected = tuple(why is None for why in scored.left_out)
    return RolloutRewards(tuple(steps), scored.final, selected, tuple(critic) if known.values is not None else ())


def _part(scored: SelectedRollout, key: str | None) -> Hashable:
    given = scored.episode.task.input
    return repr(given.get(key)) if key is not None and isinstance(given, dict) else None


def _states(
    scored: Sequence[SelectedRollout], rows: Sequence[Sample], group_R: Ints, rules: AdvantageEstimator
) -> Ints:
    if rules.state is None:
        return np.arange(len(rows))
    episodes = [scored[row.rollout].episode for row in rows]
    keys = [rules.state(episode, episode.calls[row.turn]) for episode, row in zip(episodes, rows, strict=True)]
    return numbered([int(group_R[row.rollout]) for row in rows], keys)
