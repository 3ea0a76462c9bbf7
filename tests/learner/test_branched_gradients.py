"""The gradient of groups whose rollouts share a replayed prefix is the textbook's, computed call by call by hand."""

from random import Random
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from smallepisodes import continuation, episode
from smallpolicy import compute_in_double, prepare_updates, small_policy

from leyden.config import Config, read_config
from leyden.episodes import Episode
from leyden.learner.objective import objective_of
from leyden.learner.policy import Policy
from leyden.orchestrator.credit.samples import SampleFilter, StepAccounting, select_rollouts
from leyden.records import Call

RULES = SampleFilter(min_group=2, failure_reward=0.0, roles=None)


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Policy:
    """A policy that computes everything in double precision."""
    compute_in_double(monkeypatch, "llama")
    return small_policy(dtype=torch.float64)


def conversation(rng: Random, name: str, calls: int, before: tuple[Call, ...] = ()) -> list[Call]:
    """Calls of which each goes on from the one before, by the tokens that it keeps of it."""
    found = [*before]
    for number in range(len(before), len(before) + calls):
        completion = tuple(rng.randrange(64) for _ in range(rng.randint(1, 5)))
        parent = found[-1] if found else None
        found.append(
            Call(
                id=f"{name}{number}",
                parent=None if parent is None else parent.id,
                kept_ids=0 if parent is None else parent.kept_ids + len(parent.prompt_ids + parent.completion_ids),
                prompt_ids=tuple(rng.randrange(64) for _ in range(rng.randint(1, 6))),
                completion_ids=completion,
                logprobs=(-1.0,) * len(completion),
            )
        )
    return found[len(before) :]


def continued(rng: Random, origin: Episode, after: int, rewards: list[float]) -> list[Episode]:
    return [
        continuation(origin, after, index, reward, conversation(rng, f"{after}-{index}-", 2, origin.calls[:after]))
        for index, reward in enumerate(rewards)
    ]


def by_hand(policy: Policy, worth: list[tuple[Episode, int, float]]) -> dict[str, torch.Tensor]:
    """The gradient of -sum(worth of a call x logprob of its tokens), each call by itself."""
    total = torch.zeros((), dtype=torch.float64)
    for rollout, index, weight in worth:
        prompt, completion = rollout.transitions[index].prompt_ids, rollout.transitions[index].completion_ids
        logits = policy.model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        total = total - weight * logits.log_softmax(-1)[range(len(completion)), list(completion)].sum()
    gradients = torch.autograd.grad(total, [*policy.parameters.values()])
    return dict(zip(policy.parameters, gradients, strict=True))


def check(policy: Policy, config: Config, groups: list[list[Episode]], worth: list[tuple[Episode, int, float]]) -> None:
    selected = [found for group in groups if (found := select_rollouts(group, RULES, StepAccounting())) is not None]
    (update,) = prepare_updates(selected, 1, policy, config, StepAccounting())
    assert len(update.samples) == len(worth)
    policy.accumulate(update.samples, update.old_logprobs, objective_of(config))
    found = {name: each.grad.clone() for name, each in policy.parameters.items() if each.grad is not None}
    for name, expected in by_hand(policy, worth).items():
        torch.testing.assert_close(found[name], expected, atol=1e-9, rtol=1e-9)


def config(**algorithm: Any) -> Config:
    return read_config({"run": "r", "agent": "a", "tasks": "t", "algorithm": {"correction": "none", **algorithm}})


@pytest.mark.parametrize("seed", range(2))
def test_a_group_that_continues_a_rollout_is_grpo_of_whole_rollouts_on_what_it_adds(policy: Policy, seed: int) -> None:
    """A token counts as much as in a rollout from the start: one of all in its rollout, replayed ones included."""
    rng = Random(seed)
    origin = episode(0, 1.0, conversation(rng, "o", 3))
    rewards = [1.0, 0.0, 0.0]
    group = continued(rng, origin, 2, rewards)
    worth = []
    for rollout, reward in zip(group, rewards, strict=True):
        tokens = sum(len(call.completion_ids) for call in rollout.calls)
        advantage = (reward - fmean(rewards)) / stdev(rewards)
        worth += [(rollout, index, advantage / (3 * tokens)) for index in (2, 3)]
    check(policy, config(), [group], worth)


@pytest.mark.parametrize("seed", range(2))
def test_credit_by_sampling_is_the_difference_of_mean_returns(policy: Policy, seed: int) -> None:
    rng = Random(seed)
    first, second = episode(0, 1.0, conversation(rng, "a", 3)), episode(1, 0.0, conversation(rng, "b", 2))
    rewards = [0.0, 1.0, 0.0]
    group = continued(rng, first, 1, rewards)
    value = fmean([1.0, *rewards])  # of the state after the first call: the rollout is one of four that left it
    worth = [(first, 0, value - 0.0), (first, 1, (1.0 - fmean(rewards)) / 4), (first, 2, (1.0 - fmean(rewards)) / 4)]
    worth += [(second, index, 0.0 - value) for index in (0, 1)]
    for rollout, reward, others in zip(group, rewards, ([1.0, 0.0], [0.0, 0.0], [0.0, 1.0]), strict=True):
        worth += [(rollout, index, (reward - fmean(others)) / 4) for index in (1, 2)]
    named = config(credit="sampled", advantage="rloo", aggregation="constant", length=7)
    check(policy, named, [[first, second], group], [(one, index, each / (2 * 7)) for one, index, each in worth])
