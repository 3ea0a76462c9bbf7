"""Computes advantage, loss weight and critic target of each sample of an update."""

import math
from collections.abc import Hashable, Sequence
from statistics import stdev
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from leyden.config import Hyperparameters
from leyden.learner.sample import Sample
from leyden.orchestrator.credit.branches import add_returns, find_continuations, shares, times_counted, with_replayed
from leyden.orchestrator.credit.samples import Groups, SelectedRollout, SituatedAdvantage, StepAccounting, make_samples
from leyden.rl import advantage as advantages
from leyden.rl.advantage import Advantage, CallBatch, Ints
from leyden.rl.aggregation import Aggregation
from leyden.rl.credit import Credit, RolloutRewards
from leyden.rl.situation import Situation, situations
from leyden.rl.state import StateKey, number_classes, shared_fraction

Compare = Literal["group", "role", "turn"]


class AdvantageEstimator(Struct, frozen=True):
    """The functions that turn rewards into advantages and token weights."""

    credit: Credit
    advantage: Advantage
    aggregation: Aggregation
    hyperparameters: Hyperparameters
    level: Literal["rollout", "transition"]
    state: StateKey | None
    """The state key, if the advantage reads states."""
    scale_steps: bool
    """Whether step and automatic rewards are multiplied by the deviation of their group's final rewards."""
    normalize_by: str | None
    """A key of the task's input: global normalisation is done within each of its values."""
    compare: Compare | None = "group"
    """Which calls of a group are compared: all, those of the same role, or those of the same role and turn. None: the
    advantage does not read it."""


class StepInputs(Struct, frozen=True):
    """Model outputs on the samples of an update before it begins, one entry for each sample."""

    penalties: Sequence[float] | None = None
    """Subtracted from the reward of a call for its KL divergence from the reference."""
    values: Sequence[float] | None = None
    """The critic's value of the state before the call."""


class _Entry(Struct, frozen=True):
    """One entry of the batch of calls that are compared."""

    rollout: int
    """Numbered over all groups."""
    situation: Situation
    value: float
    baseline: float
    """The critic's value of the state before the call; 0 without a critic."""
    known: float = math.nan
    """The value of that state, as continuations estimate it."""


class _CreditedCall(_Entry, frozen=True, kw_only=True):
    """The entry of a call that gets credit."""

    sample: Sample


def compute_advantages(
    groups: Groups,
    samples: Sequence[Sample],
    inputs: StepInputs,
    estimator: AdvantageEstimator,
    accounting: StepAccounting,
) -> list[Sample]:
    """Return the samples that get credit, with their advantages. `samples` are those of `groups`, in order.

    Rollouts without samples count in the statistics; see `_without_samples`.
    """
    rollouts = [rollout for group in groups for rollout in group]
    samples_R: list[list[int]] = [[] for _ in rollouts]
    for index, sample in enumerate(samples):
        samples_R[sample.rollout].append(index)
    group_R = np.array([number for number, group in enumerate(groups) for _ in group], dtype=np.int64)
    scale_G = [_step_scale(group) if estimator.scale_steps else 1.0 for group in groups]
    rewards_R = [
        _rewards(one, scale_G[group], samples, indices, inputs)
        for one, group, indices in zip(rollouts, group_R, samples_R, strict=True)
    ]
    continuations = find_continuations(groups)
    rewards_R = add_returns(rewards_R, continuations)
    values_R_C = [estimator.credit(rewards, estimator.hyperparameters) for rewards in rewards_R]
    known_R_C = [rewards.known for rewards in rewards_R]
    situations_R_C = [situations(rollout.episode) for rollout in rollouts]
    credited = [
        _CreditedCall(
            sample.rollout,
            situations_R_C[sample.rollout][sample.call_index],
            value,
            inputs.values[index] if inputs.values else 0.0,
            math.nan if (known := known_C[sample.call_index]) is None else known,
            sample=sample,
        )
        for values_C, known_C, indices in zip(values_R_C, known_R_C, samples_R, strict=True)
        for index, sample in ((index, samples[index]) for index in indices)
        if (value := values_C[sample.call_index]) is not None
    ]
    accounting.calls_trained += len(credited)
    if missing := len(samples) - len(credited):
        accounting.calls_excluded["no credit"] += missing
    # A critic has no value for a rollout without samples.
    without = _without_samples(credited, samples_R, group_R, rewards_R) if inputs.values is None else []
    calls = _call_batch(credited, without, rollouts, group_R, rewards_R, estimator)
    compared = advantages.count_groups(calls)
    accounting.groups_single += compared.alone
    accounting.groups_flat += compared.flat
    if estimator.state is not None:
        accounting.states_shared.append(shared_fraction(calls.state[: len(credited)]))
    if inputs.values is not None and (variance := calls.value.var()) > 0:
        accounting.critic_explained.append(float(1 - (calls.value - calls.baseline).var() / variance))
    tokens_R: list[dict[int, int]] = [{} for _ in rollouts]
    for call in credited:
        tokens_R[call.rollout][call.sample.call_index] = len(call.sample.token_indices)
    whole_R = with_replayed(tokens_R, rollouts, values_R_C)
    tokens_R_C = [[*tokens.values()] for tokens in whole_R]
    weights_R_C = estimator.aggregation(tokens_R_C, estimator.hyperparameters)
    weight_R = [dict(zip(tokens, weights, strict=True)) for tokens, weights in zip(whole_R, weights_R_C, strict=True)]
    weights_C = [weight_R[call.rollout][call.sample.call_index] for call in credited]
    if continuations:
        times = times_counted(tokens_R_C, continuations)
        shares_C = shares(((call.rollout, call.sample.call_index) for call in credited), continuations)
        weights_C = [times * share * weight for share, weight in zip(shares_C, weights_C, strict=True)]
    advantages_C = estimator.advantage(calls, estimator.hyperparameters)[: len(credited)]
    accounting.advantages += [
        SituatedAdvantage(rollouts[call.rollout].episode.rollout.group, call.situation, float(advantage))
        for call, advantage in zip(credited, advantages_C, strict=True)
    ]
    return [
        replace(call.sample, advantage=float(advantage), weight=weight, target=call.value, old_value=call.baseline)
        for call, advantage, weight in zip(credited, advantages_C, weights_C, strict=True)
    ]


def teaches(group: Sequence[SelectedRollout], estimator: AdvantageEstimator) -> bool:
    """Whether a call of a group has an advantage, as far as rewards give one."""
    samples = make_samples([group])
    return any(one.advantage for one in compute_advantages([group], samples, StepInputs(), estimator, StepAccounting()))


def _without_samples(
    credited: Sequence[_CreditedCall],
    samples_R: Sequence[Sequence[int]],
    group_R: Ints,
    rewards_R: Sequence[RolloutRewards],
) -> list[_Entry]:
    """Return an entry for each rollout without samples, with its return as value and its group's first situation.

    Otherwise the baseline would leave out failures before the first token.
    """
    first_G: dict[int, Situation] = {}
    for call in credited:
        first_G.setdefault(group_R[call.rollout], call.situation)
    return [
        _Entry(number, first_G[group_R[number]], rewards_R[number].total, 0.0)
        for number, indices in enumerate(samples_R)
        if not indices and group_R[number] in first_G
    ]


def _call_batch(
    credited: Sequence[_CreditedCall],
    without_samples: Sequence[_Entry],
    rollouts: Sequence[SelectedRollout],
    group_R: Ints,
    rewards_R: Sequence[RolloutRewards],
    estimator: AdvantageEstimator,
) -> CallBatch:
    """Build the batch of calls to compare: those with credit, then the rollouts without samples."""
    entries = [*credited, *without_samples]
    rollout_C = np.array([entry.rollout for entry in entries], dtype=np.int64)
    kind_C = [_kind(rollouts[entry.rollout], estimator.normalize_by) for entry in entries]
    situation_C = [_compared(entry.situation, estimator.compare) for entry in entries]
    all_same = [0] * len(entries)
    states = _states(credited, rollouts, group_R, estimator)
    return CallBatch(
        value=np.array([entry.value for entry in entries], dtype=np.float64),
        weight=advantages.weights(rollout_C, estimator.level),
        group=group_R[rollout_C],
        rollout=rollout_C,
        kind=number_classes(all_same, kind_C),
        returns=np.array([rewards.total for rewards in rewards_R])[rollout_C],
        baseline=np.array([entry.baseline for entry in entries], dtype=np.float64),
        state=np.concatenate([states, states.max(initial=-1) + 1 + np.arange(len(without_samples))]),
        known=None if all(math.isnan(entry.known) for entry in entries) else np.array([one.known for one in entries]),
        situation=None if estimator.compare in ("group", None) else number_classes(all_same, situation_C),
    )


def _step_scale(group: Sequence[SelectedRollout]) -> float:
    """Return the standard deviation of the final rewards of a group."""
    return stdev(rollout.final for rollout in group) if len(group) > 1 else 0.0


def _rewards(
    rollout: SelectedRollout, scale: float, samples: Sequence[Sample], indices: Sequence[int], inputs: StepInputs
) -> RolloutRewards:
    steps = [scale * transition.reward for transition in rollout.episode.transitions]
    critic = [0.0] * len(steps)
    for index in indices:
        if inputs.penalties is not None:
            steps[samples[index].call_index] -= inputs.penalties[index]
        if inputs.values is not None:
            critic[samples[index].call_index] = inputs.values[index]
    selected = tuple(reason is None for reason in rollout.exclusion_reasons)
    return RolloutRewards(tuple(steps), rollout.final, selected, tuple(critic) if inputs.values is not None else ())


def _compared(situation: Situation, compare: Compare | None) -> Hashable:
    return situation if compare == "turn" else situation.role


def _kind(rollout: SelectedRollout, key: str | None) -> Hashable:
    given = rollout.episode.task.input
    return repr(given.get(key)) if key is not None and isinstance(given, dict) else None


def _states(
    credited: Sequence[_CreditedCall], rollouts: Sequence[SelectedRollout], group_R: Ints, estimator: AdvantageEstimator
) -> Ints:
    if estimator.state is None:
        return np.arange(len(credited))
    episodes = [rollouts[call.rollout].episode for call in credited]
    keys = [
        estimator.state(episode, episode.calls[call.sample.call_index])
        for episode, call in zip(episodes, credited, strict=True)
    ]
    return number_classes([int(group_R[call.rollout]) for call in credited], keys)
