"""Algorithms are found by name, declare what they go with, and are added as one file."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from smallepisodes import call, episode
from smallpolicy import prepare_updates, small_policy

import leyden.rl.advantage
import leyden.rl.credit
import leyden.rl.loss
from leyden.config import AlgorithmConfig, ConfigError, read_config
from leyden.learner.objective import objective_of
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.orchestrator.credit.samples import SampleFilter, StepAccounting, select_rollouts
from leyden.rl.advantage.grpo import grpo
from leyden.rl.registry import (
    KINDS,
    IncompatibleAlgorithms,
    Kind,
    UnknownAlgorithm,
    check_pair,
    declaration,
    goes_with,
    load,
    names,
    needs_critic,
    readers,
    unused_settings,
)

PAIRS = {
    **dict.fromkeys(
        ("reinforce_pp", "reinforce_pp_baseline"),
        ("identical", "discounted", "stepwise", "last_call"),
    ),
    **dict.fromkeys(
        ("grpo", "dr_grpo", "rloo"),
        ("identical", "discounted", "stepwise", "last_call", "sampled"),
    ),
    "gigpo": ("discounted", "stepwise"),
    "ppo": ("gae",),
}


def check(credit: str, advantage: str) -> None:
    check_pair(credit, advantage, preferred="grpo")


def test_an_algorithm_is_found_by_its_name() -> None:
    assert load("advantage", "grpo") is grpo


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_of_a_kind_holds_the_function_of_its_name(kind: Kind) -> None:
    for name in names(kind):
        assert load(kind, name).__name__ == name


@pytest.mark.parametrize("kind", KINDS)
def test_algorithms_declare_keys_that_a_configuration_has(kind: Kind) -> None:
    for name in names(kind):
        declared = declaration(kind, name)
        assert declared is not None
        assert {*declared.reads, *declared.requires} <= set(AlgorithmConfig.__struct_fields__)


def test_an_unknown_name_is_answered_with_those_that_exist_and_a_suggestion() -> None:
    with pytest.raises(UnknownAlgorithm) as unknown:
        load("loss", "ppo_clp")
    assert str(unknown.value) == (
        "`algorithm.loss`: there is no 'ppo_clp'; did you mean 'ppo_clip'? "
        "There are cispo, gspo, ppo_clip, reinforce, or module:function, or file.py:function"
    )
    with pytest.raises(UnknownAlgorithm, match="there are masked, truncated, none, or module:function"):
        load("correction", "clipped")


def test_every_credit_and_every_advantage_goes_with_some_other() -> None:
    assert PAIRS.keys() == {*names("advantage")}
    assert {credit for credits in PAIRS.values() for credit in credits} == {*names("credit")}


@pytest.mark.parametrize(("credit", "advantage"), list(product(names("credit"), names("advantage"))))
def test_a_pair_goes_together_or_is_refused(credit: str, advantage: str) -> None:
    if credit in PAIRS[advantage]:
        check(credit, advantage)
    else:
        with pytest.raises(IncompatibleAlgorithms, match=f'write `algorithm.credit = "{PAIRS[advantage][0]}"`'):
            check(credit, advantage)


def test_a_refusal_names_both_ways_out() -> None:
    with pytest.raises(IncompatibleAlgorithms) as refused:
        check("identical", "ppo")
    assert str(refused.value) == (
        '`algorithm.advantage = "ppo"` does not go with `algorithm.credit = "identical"`: write '
        '`algorithm.credit = "gae"`, or `algorithm.advantage = "grpo"` to keep that credit'
    )


def test_a_users_function_goes_with_everything_except_as_the_credit_of_ppo() -> None:
    check("mine:credit", "grpo")
    check("mine:credit", "mine:advantage")
    check("gae", "mine:advantage")
    with pytest.raises(IncompatibleAlgorithms, match=r'write `algorithm.credit = "gae"`$'):
        check("mine:credit", "ppo")


def test_unknown_names_are_for_load_to_refuse() -> None:
    check("identical", "grpoo")
    check("identicle", "grpo")


def test_a_critic_is_needed_where_its_values_are_read() -> None:
    assert needs_critic("gae", "ppo")
    assert needs_critic("gae", "mine:advantage")
    assert not needs_critic("identical", "grpo")


def test_names_and_pairs_are_checked_without_torch() -> None:
    script = (
        "import sys; from leyden.rl.registry import KINDS, check_pair, names; "
        "assert all(names(kind) for kind in KINDS); check_pair('gae', 'ppo', 'grpo'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


ADVANTAGE = """
from leyden.config import Hyperparameters
from leyden.rl.advantage import CallBatch, Floats
from leyden.rl.registry import advantage


@advantage(credits=("identical",), reads=("gamma",))
def scaled(calls: CallBatch, hyperparameters: Hyperparameters) -> Floats:
    return hyperparameters.gamma * calls.value
"""
CREDIT = """
from leyden.config import Hyperparameters
from leyden.rl.credit import RolloutRewards
from leyden.rl.registry import credit


@credit(reads=("lam",), advantages=("grpo",))
def first_call(rewards: RolloutRewards, hyperparameters: Hyperparameters) -> list[float | None]:
    return [rewards.total, *[None] * (len(rewards.steps) - 1)]
"""
LOSS = """
from torch import Tensor

from leyden.config import Hyperparameters
from leyden.rl.loss import TokenBatch
from leyden.rl.registry import loss


@loss(reads=("clip_high",))
def squared(tokens: TokenBatch, hyperparameters: Hyperparameters) -> tuple[Tensor, dict[str, Tensor]]:
    return (tokens.current - tokens.proximal) ** 2 - tokens.advantages * tokens.current, {}
"""


@pytest.fixture
def added(tmp_path: Path) -> Iterator[None]:
    """Three algorithms, each one file in its package and nothing else."""
    new = {
        "advantage": (leyden.rl.advantage, "scaled", ADVANTAGE),
        "credit": (leyden.rl.credit, "first_call", CREDIT),
        "loss": (leyden.rl.loss, "squared", LOSS),
    }
    for kind, (package, name, source) in new.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"{name}.py").write_text(source)
        package.__path__.append(str(tmp_path / kind))
    names.cache_clear()
    yield
    names.cache_clear()
    for package, name, _ in new.values():
        package.__path__.pop()
        sys.modules.pop(f"{package.__name__}.{name}", None)


def configured(**algorithm: object) -> AlgorithmConfig:
    return AlgorithmConfig(**algorithm)


@pytest.mark.usefixtures("added")
def test_a_new_algorithm_is_one_file_and_trains() -> None:
    named = {"credit": "identical", "advantage": "scaled", "loss": "squared", "gamma": 0.5}
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "algorithm": named})
    policy = small_policy()
    pair = [episode(0, 1.0, [call("a", 4), call("b", 3)]), episode(1, 0.5, [call("c", 2)])]
    group = select_rollouts(pair, SampleFilter(min_group=1, failure_reward=0.0, roles=None), StepAccounting())
    assert group is not None
    (update,) = prepare_updates([group], 1, policy, config, StepAccounting())
    assert [sample.advantage for sample in update.samples] == [0.5 * sample.target for sample in update.samples]
    metrics = policy.accumulate(update.samples, update.old_logprobs, objective_of(config))
    assert np.isfinite(metrics.grad_norm) and metrics.grad_norm > 0


@pytest.mark.usefixtures("added")
def test_a_new_algorithm_declares_what_it_goes_with_and_reads() -> None:
    assert "scaled" in names("advantage") and "first_call" in names("credit")
    assert goes_with("first_call", "grpo") and goes_with("identical", "scaled")
    assert "scaled" in readers("gamma")["advantage"]
    assert unused_settings(configured(advantage="scaled", gamma=0.5)) == []
    assert unused_settings(configured(credit="first_call", lam=0.5)) == []
    assert unused_settings(configured(gamma=0.5)) == [
        '`algorithm.gamma` does nothing with `credit = "identical"` and `advantage = "grpo"`'
    ]
    with pytest.raises(ConfigError, match=r"`algorithm\.advantage = .grpo.` to keep that credit"):
        document = {"run": "r", "agent": "a", "tasks": "t"}
        algorithm_of(read_config({**document, "algorithm": {"credit": "first_call", "advantage": "rloo"}}))
