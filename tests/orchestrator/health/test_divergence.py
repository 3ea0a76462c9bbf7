"""The divergence from the starting model, on calls of the first step."""

from math import exp
from pathlib import Path

import pytest
import torch
from smallepisodes import call, episode
from smallpolicy import OBJECTIVE, small_policy

from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.policy import Policy
from leyden.orchestrator.credit.samples import SelectedRollout
from leyden.orchestrator.health.divergence import Divergence


def groups(rollouts: int = 3) -> list[list[SelectedRollout]]:
    return [[SelectedRollout(episode(n, 1.0, [call(str(n), n % 7 + 2)]), 1.0, (None,)) for n in range(rollouts)]]


def learner_of(policy: Policy) -> LocalLearner:
    return LocalLearner({"mine": TrainedPolicy(policy, OBJECTIVE, checkpoints=None)})


def divergence_of(policy: Policy, path: Path, last_step: int = 99) -> Divergence:
    return Divergence(path, learner_of(policy), "mine", last_step)


def move(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)


async def test_it_is_0_at_the_start_and_then_the_mean_of_k3_over_the_sampled_tokens(tmp_path: Path) -> None:
    policy = small_policy()
    samples = [one for group in groups() for rollout in group for one in rollout.transitions]
    divergence = divergence_of(policy, tmp_path / "start.msgpack", last_step=8)
    assert await divergence.measure(groups(), 1, moved=False) == 0.0
    start = divergence._start
    assert start is not None and len(start.samples) == len(samples) == 3
    move(policy)
    assert [await divergence.measure(groups(), step, moved=True) for step in (2, 3, 4, 5, 7)] == [None] * 5
    now = [one for some in policy.logprobs(start.samples) for one in some.tolist()]
    then = [one for some in start.logprobs for one in some]
    by_hand = [exp(b - a) - 1 - (b - a) for a, b in zip(then, now, strict=True)]
    assert len(by_hand) == 2 + 3 + 4
    assert (
        await divergence.measure([], 6, moved=True)
        == await divergence.measure([], 8, moved=True)
        == pytest.approx(sum(by_hand) / 9)
    )
    assert sum(by_hand) > 0


async def test_a_run_that_resumes_measures_from_the_same_start(tmp_path: Path) -> None:
    policy = small_policy()
    first = divergence_of(policy, tmp_path / "policies/mine/start.msgpack")
    await first.measure(groups(), 1, moved=False)
    move(policy)
    again = divergence_of(policy, tmp_path / "policies/mine/start.msgpack")
    assert await again.measure([], 6, moved=True) == await first.measure([], 6, moved=True) != 0.0
    assert await divergence_of(policy, tmp_path / "none.msgpack").measure([], 6, moved=True) is None


async def test_few_calls_of_all_groups_are_kept(tmp_path: Path) -> None:
    divergence = divergence_of(small_policy(), tmp_path / "start.msgpack")
    await divergence.measure(groups(100), 1, moved=False)
    assert divergence._start is not None
    kept = [len(sample.completion_ids) for sample in divergence._start.samples]
    assert kept == [n % 7 + 2 for n in range(0, 100, 4)]


async def test_the_start_is_that_of_the_first_step_that_has_groups(tmp_path: Path) -> None:
    policy = small_policy()
    divergence = divergence_of(policy, tmp_path / "start.msgpack")
    assert await divergence.measure([], 1, moved=False) is None
    assert await divergence.measure(groups(), 2, moved=False) is None  # not due, and the calls are kept
    again = divergence_of(policy, tmp_path / "start.msgpack")
    assert await again.measure([], 6, moved=True) == 0.0
