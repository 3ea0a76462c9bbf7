"""Computes advantage, loss weight and critic target of each sample of an update."""

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from leyden.config import Hyperparameters
from leyden.rl import advantage as advantages
from leyden.rl.advantage import Advantage, CallBatch, Ints
from leyden.rl.aggregation import Aggregation
from leyden.rl.credit import Credit, RolloutRewards
from leyden.rl.state import StateKey, number_classes, shared_fraction
from leyden.trainer.batch.samples import Sample, SelectedRollout, StepAccounting


class AdvantageEstimator(Struct, frozen=True):
    """The functions that turn rewards into advantages and token weights."""

    credit: Credit
    advantage: Advantage
    aggregation: Aggregation
    hyperparameters: Hyperparameters
    level: Literal["rollout", "transition"]
    state: StateKey | None
    """The state key, if the advantage reads states."""
    normalize_by: str | None
    """A key of the task's input: global normalisation is done within each of its values."""


class StepInputs(Struct, frozen=True):
    """Model outputs on the samples of an update before it begins, one entry for each sample."""

    penalties: Sequence[float] | None = None
    """Subtracted from the reward of a call for its KL divergence from the reference."""
    values: Sequence[float] | None = None
    """The critic's value of the state before the call."""


def compute_advantages(
    groups: Sequence[Sequence[SelectedRollout]],
    samples: Sequence[Sample],
    inputs: StepInputs,
    estimator: AdvantageEstimator,
    accounting: StepAccounting,
) -> list[Sample]:
    """Return the samples that get credit, with their advantages. `samples` are those of `groups`, in order.

    A rollout without samples is one entry of the statistics, with its return as value; otherwise the baseline would
    leave out failures before the first token. With a critic it is left out, because the critic has no value for it.
    """
    rollouts = [rollout for group in groups for rollout in group]
    samples_R: list[list[int]] = [[] for _ in rollouts]
    for index, sample in enumerate(samples):
        samples_R[sample.rollout].append(index)
    rewards_R = [_rewards(one, samples, indices, inputs) for one, indices in zip(rollouts, samples_R, strict=True)]
    values_R_C = [estimator.credit(rewards, estimator.hyperparameters) for rewards in rewards_R]
    value_of = {
        index: value
        for values_C, indices in zip(values_R_C, samples_R, strict=True)
        for index in indices
        if (value := values_C[samples[index].call_index]) is not None
    }
    accounting.calls_trained += len(value_of)
    if missing := len(samples) - len(value_of):
        accounting.calls_excluded["no credit"] += missing
    silent = [number for number, indices in enumerate(samples_R) if not indices and inputs.values is None]
    rollout_C = np.array([*(samples[index].rollout for index in value_of), *silent], dtype=np.int64)
    group_R = np.array([number for number, group in enumerate(groups) for _ in group], dtype=np.int64)
    states = _states(rollouts, [samples[index] for index in value_of], group_R, estimator)
    calls = CallBatch(
        value=np.array([*value_of.values(), *(rewards_R[number].total for number in silent)], dtype=np.float64),
        weight=advantages.weights(rollout_C, estimator.level),
        group=group_R[rollout_C],
        rollout=rollout_C,
        part=number_classes([0] * len(rollouts), [_part(one, estimator.normalize_by) for one in rollouts])[rollout_C],
        returns=np.array([rewards.total for rewards in rewards_R])[rollout_C],
        baseline=np.array(
            [*(inputs.values[index] if inputs.values else 0.0 for index in value_of), *(0.0 for _ in silent)]
        ),
        state=np.concatenate([states, states.max(initial=-1) + 1 + np.arange(len(silent))]),
    )
    compared = advantages.groups(calls)
    accounting.groups_single += compared.alone
    accounting.groups_flat += compared.flat
    if estimator.state is not None:
        accounting.states_shared.append(shared_fraction(states))
    if inputs.values is not None and (variance := calls.value.var()) > 0:
        accounting.critic_explained.append(float(1 - (calls.value - calls.baseline).var() / variance))
    tokens_R_C = [
        [len(samples[index].token_indices) for index in indices if index in value_of] for indices in samples_R
    ]
    weights_R_C = estimator.aggregation(tokens_R_C, estimator.hyperparameters)
    advantages_C = estimator.advantage(calls, estimator.hyperparameters)[: len(value_of)]
    return [
        replace(samples[index], advantage=float(advantage), weight=weight, target=target)
        for (index, target), advantage, weight in zip(value_of.items(), advantages_C, chain(*weights_R_C), strict=True)
    ]


def _rewards(
    rollout: SelectedRollout, samples: Sequence[Sample], indices: Sequence[int], inputs: StepInputs
) -> RolloutRewards:
    steps = [transition.reward for transition in rollout.episode.transitions]
    critic = [0.0] * len(steps)
    for index in indices:
        if inputs.penalties is not None:
            steps[samples[index].call_index] -= inputs.penalties[index]
        if inputs.values is not None:
            critic[samples[index].call_index] = inputs.values[index]
    selected = tuple(reason is None for reason in rollout.exclusion_reasons)
    return RolloutRewards(tuple(steps), rollout.final, selected, tuple(critic) if inputs.values is not None else ())


def _part(rollout: SelectedRollout, key: str | None) -> Hashable:
    given = rollout.episode.task.input
    return repr(given.get(key)) if key is not None and isinstance(given, dict) else None


def _states(
    rollouts: Sequence[SelectedRollout], samples: Sequence[Sample], group_R: Ints, estimator: AdvantageEstimator
) -> Ints:
    if estimator.state is None:
        return np.arange(len(samples))
    episodes = [rollouts[sample.rollout].episode for sample in samples]
    keys = [
        estimator.state(episode, episode.calls[sample.call_index])
        for episode, sample in zip(episodes, samples, strict=True)
    ]
    return number_classes([int(group_R[sample.rollout]) for sample in samples], keys)
