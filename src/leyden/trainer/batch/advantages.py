"""Computes advantage, loss weight and critic target of each sample of an update."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from statistics import stdev
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
    scale_steps: bool
    """Whether step and automatic rewards are multiplied by the deviation of their group's final rewards."""
    normalize_by: str | None
    """A key of the task's input: global normalisation is done within each of its values."""
    by_role: bool = False
    """Whether calls are compared only with calls of the same role."""


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

    Rollouts without samples count in the statistics; see `_call_batch`.
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
    calls, states = _call_batch(groups, rollouts, group_R, samples, value_of, rewards_R, inputs, estimator)
    compared = advantages.count_groups(calls)
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
        replace(
            samples[index],
            advantage=float(advantage),
            weight=weight,
            target=target,
            old_value=inputs.values[index] if inputs.values else 0.0,
        )
        for (index, target), advantage, weight in zip(value_of.items(), advantages_C, chain(*weights_R_C), strict=True)
    ]


def _call_batch(
    groups: Sequence[Sequence[SelectedRollout]],
    rollouts: Sequence[SelectedRollout],
    group_R: Ints,
    samples: Sequence[Sample],
    value_of: Mapping[int, float],
    rewards_R: Sequence[RolloutRewards],
    inputs: StepInputs,
    estimator: AdvantageEstimator,
) -> tuple[CallBatch, Ints]:
    """Build the batch of calls to compare, and return the states of those with samples; these come first.

    A rollout without samples is one entry, with its return as value; otherwise the baseline would leave out failures
    before the first token. With `by_role` it is one entry for each role of its group. With a critic it is left out,
    because the critic has no value for it.
    """
    credited = [samples[index] for index in value_of]
    roles = [_role(rollouts, sample) if estimator.by_role else None for sample in credited]
    roles_G: list[dict[str | None, None]] = [{} for _ in groups]
    for role, sample in zip(roles, credited, strict=True):
        roles_G[group_R[sample.rollout]][role] = None
    sampled = {sample.rollout for sample in samples}
    silent = [
        (number, role)
        for number in range(len(rollouts))
        if number not in sampled and inputs.values is None
        for role in roles_G[group_R[number]]
    ]
    rollout_C = np.array([*(sample.rollout for sample in credited), *(number for number, _ in silent)], dtype=np.int64)
    role_C = [*roles, *(role for _, role in silent)]
    part_R = number_classes([0] * len(rollouts), [_part(one, estimator.normalize_by) for one in rollouts])
    member_C = number_classes(rollout_C.tolist(), role_C)
    critic = inputs.values or [0.0] * len(samples)
    states = _states(rollouts, credited, group_R, estimator)
    calls = CallBatch(
        value=np.array([*value_of.values(), *(rewards_R[number].total for number, _ in silent)], dtype=np.float64),
        weight=advantages.weights(member_C, estimator.level),
        group=number_classes(group_R[rollout_C].tolist(), role_C),
        rollout=member_C,
        part=number_classes(part_R[rollout_C].tolist(), role_C),
        returns=np.array([rewards.total for rewards in rewards_R])[rollout_C],
        baseline=np.array([*(critic[index] for index in value_of), *(0.0 for _ in silent)]),
        state=np.concatenate([states, states.max(initial=-1) + 1 + np.arange(len(silent))]),
    )
    return calls, states


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


def _role(rollouts: Sequence[SelectedRollout], sample: Sample) -> str | None:
    episode = rollouts[sample.rollout].episode
    return episode.role(episode.calls[sample.call_index])


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
