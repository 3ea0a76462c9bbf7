"""A configuration names functions, and which calls are compared follows from them unless it is set."""

from pathlib import Path

import pytest

from leyden.config import ConfigError, read_config
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.rl.registry import unused_settings


@pytest.mark.parametrize(
    ("named", "compared"),
    [
        ({}, "group"),
        ({"credit": "last_call"}, "group"),
        ({"credit": "stepwise"}, "turn"),
        ({"credit": "discounted", "advantage": "reinforce_pp"}, "turn"),
        ({"credit": "mine.py:credit"}, "turn"),
        ({"credit": "discounted", "advantage": "gigpo"}, None),
        ({"credit": "gae", "advantage": "ppo"}, None),
        ({"credit": "stepwise", "compare": "group"}, "group"),
        ({"credit": "identical", "compare": "role"}, "role"),
    ],
)
def test_calls_are_compared_by_turn_if_a_credit_gives_them_different_values(
    named: dict[str, str], compared: str | None, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text("def credit(rewards, hyperparameters):\n    return list(rewards.steps)\n")
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "algorithm": named, "base": str(tmp_path)})
    assert algorithm_of(config).advantage_estimator.compare == compared


def test_a_comparison_that_nothing_reads_is_reported() -> None:
    named = {"credit": "discounted", "advantage": "gigpo", "compare": "turn"}
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "algorithm": named})
    assert unused_settings(config.algorithm) == ['`algorithm.compare` does nothing with `advantage = "gigpo"`']


@pytest.mark.parametrize(
    ("named", "advice"),
    [
        ({}, None),
        ({"compare": "group"}, None),
        ({"credit": "last_call"}, None),
        ({"advantage": "mine.py:advantage"}, None),
        ({"credit": "stepwise"}, None),
        ({"credit": "mine.py:credit"}, None),
        ({"credit": "discounted", "advantage": "gigpo"}, None),
        ({"credit": "stepwise", "compare": "group"}, '`algorithm.compare = "turn"`'),
        ({"credit": "mine.py:credit", "compare": "role"}, '`algorithm.compare = "turn"`'),
        ({"credit": "stepwise", "advantage": "mine.py:advantage"}, "`calls.expected`"),
    ],
)
def test_positions_are_advised_on_only_if_values_differ_by_call_and_something_can_be_changed(
    named: dict[str, str], advice: str | None, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "def credit(rewards, hyperparameters): ...\ndef advantage(calls, hyperparameters): ...\n"
    )
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "algorithm": named, "base": str(tmp_path)})
    found = algorithm_of(config).position_advice
    assert found is None if advice is None else found is not None and advice in found


USERS = """
def within(calls, hyperparameters):
    return calls.value - calls.mean(calls.value, calls.group)

def overall(calls, hyperparameters):
    return calls.value - calls.mean(calls.value, calls.kind)
"""


@pytest.mark.parametrize(
    ("advantage", "allowed"),
    [("grpo", True), ("reinforce_pp", False), ("mine.py:within", True), ("mine.py:overall", False)],
)
def test_flat_groups_are_replaced_only_if_an_advantage_compares_the_rollouts_of_a_group(
    advantage: str, allowed: bool, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(USERS)
    named = {"algorithm": {"advantage": advantage}, "training": {"flat_groups": "refill"}, "base": str(tmp_path)}
    config = read_config({"run": "r", "agent": "a", "tasks": "t", **named})
    if allowed:
        algorithm_of(config)
        return
    with pytest.raises(ConfigError, match="does not compare the rollouts of a group"):
        algorithm_of(config)
