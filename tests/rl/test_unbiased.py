"""On a policy small enough to write down every outcome: what estimators are on average, against the exact gradient.

The policy chooses one of three actions, and then, unless it chose the last, one of three again, knowing the first. A
choice is a call of one token. Every group of rollouts is enumerated with its probability, all in double precision.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.advantage import Advantage, CallBatch, Floats, Ints, weights
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.advantage.grpo import grpo
from leyden.rl.advantage.rloo import rloo
from leyden.rl.aggregation import Aggregation
from leyden.rl.aggregation.constant import constant
from leyden.rl.aggregation.rollout_mean import rollout_mean
from leyden.rl.correction import Level, ratios
from leyden.rl.correction.truncated import truncated
from leyden.rl.credit import Credit, RolloutRewards
from leyden.rl.credit.discounted import discounted
from leyden.rl.credit.gae import gae
from leyden.rl.credit.identical import identical
from leyden.rl.divergence import k1
from leyden.rl.loss import Loss, TokenBatch
from leyden.rl.loss.cispo import cispo
from leyden.rl.loss.gspo import gspo
from leyden.rl.loss.ppo_clip import ppo_clip
from leyden.rl.loss.reinforce import reinforce

Table = Tensor
"""Logits: sample 0 of the first choice, samples 1 and 2 of the second after the first was 0 or 1."""
Path = tuple[tuple[int, int], ...]
"""The state and the action of each choice."""

PATHS: list[Path] = [*(((0, a), (a + 1, b)) for a in range(2) for b in range(3)), ((0, 2),)]
POLICY = torch.tensor([[0.3, -0.2, 0.1], [0.5, -1.0, 0.2], [-0.4, 0.6, 0.0]], dtype=torch.float64)
OTHER = torch.tensor([[-0.1, 0.4, 0.2], [0.0, 0.7, -0.3], [0.9, -0.2, 0.1]], dtype=torch.float64)
FINAL = dict(zip(PATHS, [1.0, 0.0, 2.5, -1.0, 0.3, 1.7, 3.0], strict=True))
STEP = (0.2, -0.5, 0.4)
"""What the first action earns at once."""
EXACT = Hyperparameters(length=1, correction_high=float("inf"))


def steps(path: Path) -> list[float]:
    return [STEP[path[0][1]], 0.0][: len(path)]


def returns(path: Path) -> float:
    return sum(steps(path)) + FINAL[path]


def logprobs(table: Table, path: Path) -> Tensor:
    found = table.log_softmax(-1)
    return torch.stack([found[state, action] for state, action in path])


def exact(extra: float = 0.0) -> Tensor:
    """The gradient of -(expected return - extra x KL to the other policy)."""
    table = POLICY.clone().requires_grad_()
    found = [logprobs(table, path).sum() for path in PATHS]
    worth = [
        returns(path) - extra * (log - logprobs(OTHER, path).sum()) for path, log in zip(PATHS, found, strict=True)
    ]
    (gradient,) = torch.autograd.grad(-sum(log.exp() * w for log, w in zip(found, worth, strict=True)), table)
    return gradient


def estimated(
    credit: Credit,
    advantage: Advantage,
    loss: Loss = reinforce,
    size: int = 2,
    aggregation: Aggregation = constant,
    hyperparameters: Hyperparameters = EXACT,
    sampler: Table = POLICY,
    level: Level | None = None,
    critic: Sequence[float] = (0.0, 0.0, 0.0),
    kl_penalty: float = 0.0,
    by_turn: bool = False,
) -> Tensor:
    """The expected gradient of the estimator, over all groups of this size that the sampler can draw."""
    table = POLICY.clone().requires_grad_()
    chances, rollouts, values, baselines, weights_R, worth = [], [], [], [], [], []
    groups = list(product(PATHS, repeat=size))
    for group in groups:
        chance = torch.stack([logprobs(sampler, path).sum() for path in group]).sum().exp()
        shares = aggregation([[1] * len(path) for path in group], hyperparameters)
        for path, share in zip(group, shares, strict=True):
            costs = k1(logprobs(POLICY, path), logprobs(OTHER, path)).tolist()
            earned = [step - kl_penalty * cost for step, cost in zip(steps(path), costs, strict=True)]
            seen = tuple(critic[state] for state, _ in path)
            values += credit(RolloutRewards(tuple(earned), FINAL[path], (True,) * len(path), seen), hyperparameters)
            baselines += seen
            rollouts += [path]
            chances += [chance] * len(path)
            weights_R += share
            worth += [returns(path)] * len(path)
    rollout = np.repeat(np.arange(len(rollouts)), list(map(len, rollouts)))
    calls = CallBatch(
        value=np.array(values),
        weight=weights(rollout, "rollout"),
        group=rollout // size,
        rollout=rollout,
        kind=np.zeros_like(rollout),
        returns=np.array(worth),
        baseline=np.array(baselines),
        state=np.arange(len(rollout)),
    )
    turn = np.concatenate([np.arange(len(path)) for path in rollouts])
    found = by_situation(advantage, calls, turn) if by_turn else advantage(calls, hyperparameters)
    current = torch.cat([logprobs(table, path) for path in rollouts])
    tokens = TokenBatch(current, current.detach(), torch.from_numpy(found), torch.arange(len(current)))
    losses, _ = loss(tokens, hyperparameters)
    if level is not None:
        gap = current.detach() - torch.cat([logprobs(sampler, path) for path in rollouts])
        losses = losses * truncated(
            ratios(gap, torch.from_numpy(rollout) if level == "rollout" else None), hyperparameters
        )
    weight = torch.tensor(weights_R, dtype=torch.float64) * torch.stack(chances)
    (gradient,) = torch.autograd.grad((weight * losses).sum(), table)
    return gradient


def by_situation(advantage: Advantage, calls: CallBatch, turn: Ints) -> Floats:
    """The advantages of each group in an update with a second one, whose second turns are worth more than its first."""
    beside = np.array([0, 0, 1, 1])
    found = np.empty(len(turn))
    for group in np.unique(calls.group):
        own = calls.group == group
        given = {name: getattr(calls, name) for name in CallBatch.__struct_fields__ if name != "situation"}
        fields = {name: field[own] for name, field in given.items() if field is not None}
        added = {"value": [1.0, 4.0, 0.0, 2.0], "weight": [0.5] * 4, "group": [-1] * 4, "rollout": -1 - beside}
        update = CallBatch(
            **{name: np.concatenate([field, added.get(name, np.zeros(4, int))]) for name, field in fields.items()},
            situation=np.concatenate([turn[own], [0, 1, 0, 1]]),
        )
        found[own] = advantage(update, EXACT)[: own.sum()]
    return found


def apart(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


def askew(left: Tensor, right: Tensor) -> float:
    """The sine of the angle between two gradients: 0 where one is the other but for its size."""
    cosine = torch.nn.functional.cosine_similarity(left.flatten(), right.flatten(), 0)
    return (1 - cosine**2).clamp(min=0).sqrt().item()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("credit", [identical, discounted])
@pytest.mark.parametrize("loss", [reinforce, ppo_clip, gspo, cispo])
def test_rloo_is_unbiased_with_every_loss_where_the_policy_has_not_moved(loss: Loss, credit: Credit, size: int) -> None:
    assert apart(estimated(credit, rloo, loss, size), exact()) < 1e-12


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("credit", [identical, discounted])
def test_rloo_is_unbiased_where_calls_are_compared_by_turn(credit: Credit, size: int) -> None:
    assert apart(estimated(credit, rloo, size=size, by_turn=True), exact()) < 1e-12


@pytest.mark.parametrize("size", [2, 3])
def test_dr_grpo_is_unbiased_but_for_the_own_part_in_the_mean(size: int) -> None:
    assert apart(estimated(identical, dr_grpo, size=size), (size - 1) / size * exact()) < 1e-12


def surprise(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    """`ppo` before it is normalised."""
    return calls.value - calls.baseline


@pytest.mark.parametrize("critic", [(0.0, 0.0, 0.0), (3.0, -2.0, 0.7)])
def test_gae_with_lambda_one_is_unbiased_whatever_the_critic_says(critic: Sequence[float]) -> None:
    hyperparameters = Hyperparameters(length=1, lam=1.0)
    assert apart(estimated(discounted, surprise, hyperparameters=hyperparameters, critic=critic), exact()) < 1e-12
    assert apart(estimated(gae, surprise, hyperparameters=hyperparameters, critic=critic), exact()) < 1e-12


def test_gae_with_less_is_unbiased_where_the_critic_is_right_and_biased_where_not() -> None:
    chances = POLICY.softmax(-1)
    later = [sum((chances[a + 1, b] * FINAL[(0, a), (a + 1, b)]).item() for b in range(3)) for a in range(2)]
    hyperparameters = Hyperparameters(length=1, lam=0.3)
    assert apart(estimated(gae, surprise, hyperparameters=hyperparameters, critic=(5.0, *later)), exact()) < 1e-12
    assert apart(estimated(gae, surprise, hyperparameters=hyperparameters, critic=(5.0, 3.0, -2.0)), exact()) > 1e-2


@pytest.mark.parametrize("loss", [reinforce, ppo_clip])
def test_what_another_policy_drew_is_corrected_exactly_by_the_ratio_of_the_rollout(loss: Loss) -> None:
    assert apart(estimated(identical, rloo, loss, 2, sampler=OTHER, level="rollout"), exact()) < 1e-12
    assert apart(estimated(discounted, rloo, loss, 2, sampler=OTHER, level="rollout"), exact()) < 1e-12


def test_without_it_or_by_tokens_or_truncated_a_bias_is_left() -> None:
    bounded = Hyperparameters(length=1, correction_high=1.1)
    assert apart(estimated(identical, rloo, sampler=OTHER), exact()) > 1e-2
    assert apart(estimated(identical, rloo, sampler=OTHER, level="token"), exact()) > 1e-2
    assert apart(estimated(identical, rloo, sampler=OTHER, level="rollout", hyperparameters=bounded), exact()) > 1e-2


@pytest.mark.parametrize("credit", [identical, discounted])
def test_k1_as_a_reward_is_the_gradient_of_the_kl(credit: Credit) -> None:
    assert apart(exact(0.3), exact()) > 1e-2
    assert apart(estimated(credit, rloo, kl_penalty=0.3), exact(0.3)) < 1e-12


def test_deviations_and_lengths_in_denominators_turn_the_gradient() -> None:
    assert askew(estimated(identical, dr_grpo, size=3), exact()) < 1e-7
    assert askew(estimated(identical, grpo, size=3), exact()) > 1e-2
    assert askew(estimated(identical, rloo, aggregation=rollout_mean), exact()) > 1e-2
    assert askew(estimated(discounted, rloo, hyperparameters=Hyperparameters(length=1, gamma=0.5)), exact()) > 1e-2
