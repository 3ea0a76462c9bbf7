"""Continuations of a rollout say what its calls were worth, and count no more than what they continue.

The policy of the exact tests chooses one of three actions, and then, unless it chose the last, one of two. Every group
of two rollouts is enumerated, with every pair of continuations after the first choice of each.
"""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from msgspec.structs import replace
from smallepisodes import call, continuation, episode
from torch import Tensor

from leyden.config import Hyperparameters
from leyden.episodes import Episode
from leyden.learner.sample import Sample
from leyden.orchestrator.credit.advantages import AdvantageEstimator, StepInputs, compute_advantages
from leyden.orchestrator.credit.branches import divide_groups
from leyden.orchestrator.credit.samples import (
    SampleFilter,
    SelectedRollout,
    StepAccounting,
    make_samples,
    select_rollouts,
)
from leyden.records import Call
from leyden.rl.advantage import Advantage
from leyden.rl.advantage.dr_grpo import dr_grpo
from leyden.rl.advantage.rloo import rloo
from leyden.rl.aggregation.constant import constant
from leyden.rl.aggregation.rollout_mean import rollout_mean
from leyden.rl.credit import Credit
from leyden.rl.credit.last_call import last_call
from leyden.rl.credit.sampled import sampled

RULES = SampleFilter(min_group=1, failure_reward=0.0, roles=None)


def estimator(advantage: Advantage, exact: bool = True) -> AdvantageEstimator:
    aggregation = constant if exact else rollout_mean
    return AdvantageEstimator(sampled, advantage, aggregation, Hyperparameters(length=1), "rollout", None, False, None)


def select(*groups: Sequence[Episode]) -> list[list[SelectedRollout]]:
    found = [select_rollouts(group, RULES, StepAccounting()) for group in groups]
    return [group for group in found if group is not None]


def compute(groups: Sequence[Sequence[SelectedRollout]], rules: AdvantageEstimator) -> list[Sample]:
    return compute_advantages(groups, make_samples(groups), StepInputs(), rules, StepAccounting())


def long_rollout() -> list[list[SelectedRollout]]:
    """A rollout of four calls that is continued after its first and its third, and one that is not."""
    first = episode(0, 1.0, [call(name, 1) for name in "abcd"])
    second = episode(1, 0.0, [call("e", 1)])
    early = [continuation(first, 1, index, reward, [call(f"f{index}", 1)]) for index, reward in enumerate((0.0, 0.5))]
    late = [continuation(first, 3, index, reward, [call(f"g{index}", 1)]) for index, reward in enumerate((1.0, 0.4))]
    return select([first, second], late, early)


def test_a_call_has_the_difference_of_the_values_around_it() -> None:
    found = {sample.call: sample for sample in compute(long_rollout(), estimator(dr_grpo))}
    after_first, before_last = (1.0 + 0.0 + 0.5) / 3, (1.0 + 1.0 + 0.4) / 3
    assert {name: sample.target for name, sample in found.items()} == pytest.approx(
        {
            "a": after_first,
            "b": before_last,
            "c": before_last,
            "d": 1.0,
            "e": 0.0,
            "f0": 0,
            "f1": 0.5,
            "g0": 1,
            "g1": 0.4,
        }
    )
    start = (after_first + 0.0) / 2
    assert {name: found[name].advantage for name in "abcde"} == pytest.approx(
        {"a": after_first - start, "b": before_last - 0.25, "c": before_last - 0.25, "d": 1.0 - 0.7, "e": -start}
    )
    assert [found[name].advantage for name in ("f0", "f1", "g0", "g1")] == pytest.approx([-0.25, 0.25, 0.3, -0.3])


def test_what_was_sampled_several_times_counts_once() -> None:
    found = {sample.call: 2 * sample.weight for sample in compute(long_rollout(), estimator(dr_grpo))}
    expected = {"a": 1, "b": 1 / 3, "c": 1 / 3, "d": 1 / 9, "e": 1}
    expected |= {"f0": 1 / 3, "f1": 1 / 3, "g0": 1 / 9, "g1": 1 / 9}
    assert found == pytest.approx(expected)


def test_means_over_rollouts_count_a_call_of_a_continuation_as_the_call_beside_which_it_was_sampled() -> None:
    found = {sample.call: sample.weight for sample in compute(long_rollout(), estimator(dr_grpo, exact=False))}
    of_two = 1 / 2  # rollouts begin with their task
    assert (found["a"], found["e"]) == pytest.approx((of_two / 4, of_two))
    assert found["d"] == found["g0"] == found["g1"] == pytest.approx(of_two / 4 / 9)
    assert found["b"] == pytest.approx(of_two / 4 / 3)
    assert found["f0"] == found["f1"] == pytest.approx(of_two / 2 / 3)  # a rollout of two calls


@pytest.mark.parametrize(("credit", "length"), [(sampled, 3), (last_call, 1)])
def test_a_continuation_of_an_earlier_rollout_is_as_long_as_one_from_the_start(credit: Credit, length: int) -> None:
    """So its calls count as much as theirs; of the replayed ones those that would have a value are counted."""
    earlier = episode(9, 1.0, [call(name, 1) for name in "abc"])
    continued = [continuation(earlier, 2, index, index, [call(f"d{index}", 1)]) for index in (0, 1)]
    begun = [episode(index, index, [call(f"{name}{index}", 1) for name in "efg"]) for index in (0, 1)]
    rules = replace(estimator(dr_grpo, exact=False), credit=credit)
    found = {sample.call: sample.weight for sample in compute(select(begun, continued), rules)}
    assert found["d0"] == found["d1"] == found["g0"] == pytest.approx(1 / 4 / length)


def test_continuations_stay_in_the_update_of_what_they_continue() -> None:
    first, late, early = long_rollout()
    other = select([episode(number, 1.0, [call(f"h{number}")]) for number in (7, 8)])[0]
    from_before = select([continuation(episode(9, 1.0, [call("i")] * 3), 1, 0, 1.0, [call("j")])])[0]
    parts = divide_groups([first, late, early, other, from_before], 2)
    assert parts == [[first, late, early], [other, from_before]]
    assert divide_groups([first, late, early, other], 9) == [[first, late, early], [other]]
    assert divide_groups([first, late], 1) == [[first, late]]


PATHS = [*product(range(2), range(2)), (2,)]
POLICY = torch.tensor([[0.3, -0.2, 0.1], [0.5, -1.0, -torch.inf], [-0.4, 0.6, -torch.inf]], dtype=torch.float64)
RETURNS = dict(zip(PATHS, [1.0, 0.0, 2.5, -1.0, 0.7], strict=True))
Path = tuple[int, ...]


def logprob(table: Tensor, path: Path, choice: int) -> Tensor:
    return table.log_softmax(-1)[0 if choice == 0 else path[0] + 1, path[choice]]


def exact() -> Tensor:
    table = POLICY.clone().requires_grad_()
    chances = [torch.stack([logprob(table, path, n) for n in range(len(path))]).sum().exp() for path in PATHS]
    worth = torch.stack([chance * RETURNS[path] for chance, path in zip(chances, PATHS, strict=True)]).sum()
    (gradient,) = torch.autograd.grad(-worth, table)
    return gradient


def choices(name: str, path: Path, first: int = 0) -> list[Call]:
    return [call(f"{name}/{','.join(map(str, path))}/{choice}", 1) for choice in range(first, len(path))]


def expected_gradient(advantage: Advantage, continuations: Callable[[Path], int]) -> Tensor:
    """Over all groups of two rollouts that the policy can sample, with so many continuations after first choices."""
    groups: list[list[Episode]] = []
    chances: dict[str, float] = {}
    for number, pair in enumerate(product(PATHS, repeat=2)):
        continued = [[*product(range(2), repeat=continuations(path))] for path in pair]
        for which, new in enumerate(product(*continued)):
            name = f"{number}-{which}"
            table = POLICY.log_softmax(-1)
            chance = sum(table[0, path[0]] + sum(table[path[0] + 1, second] for second in path[1:]) for path in pair)
            chance += sum(table[path[0] + 1, b] for path, some in zip(pair, new, strict=True) for b in some)
            chances[name] = float(torch.as_tensor(chance).exp())
            both = [
                episode(2 * len(groups) + index, RETURNS[path], choices(name, path)) for index, path in enumerate(pair)
            ]
            groups.append(both)
            for rollout, path, some in zip(both, pair, new, strict=True):
                paths = [(path[0], second) for second in some]
                if paths:
                    groups.append(
                        [
                            continuation(rollout, 1, index, RETURNS[one], choices(name, one, 1))
                            for index, one in enumerate(paths)
                        ]
                    )
    table = POLICY.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for sample in compute(select(*groups), estimator(advantage)):
        name, path, choice = sample.call.split("/")
        taken = tuple(map(int, path.split(",")))
        weight = chances[name] * sample.weight * len(chances)  # of all groups of two in one update
        loss = loss - weight * sample.advantage * logprob(table, taken, int(choice))
    (gradient,) = torch.autograd.grad(loss, table)
    return gradient


def apart(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


@pytest.mark.parametrize(
    "continuations",
    [lambda path: 2 * (len(path) > 1), lambda path: 2 * (path[0] == 0), lambda path: (3, 2, 0)[path[0]]],
    ids=["every rollout", "after one action", "unequal numbers"],
)
def test_the_gradient_is_unbiased_if_points_are_chosen_by_what_came_before(
    continuations: Callable[[Path], int],
) -> None:
    assert apart(expected_gradient(rloo, continuations), exact()) < 1e-12


def test_it_is_not_if_points_are_chosen_by_what_follows() -> None:
    assert apart(expected_gradient(rloo, lambda path: 2 * (len(path) > 1 and path[1] == 1)), exact()) > 1e-2
