"""A user's function that fails or returns something wrong gives a one-line error that says what to return."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from leyden.config import ConfigError, Hyperparameters
from leyden.learner.errors import TrainingError
from leyden.learner.loss_functions import LOSS_FUNCTIONS
from leyden.learner.user_functions import load_user_function
from leyden.orchestrator.algorithm.user_functions import CREDIT_FUNCTIONS
from leyden.rl.advantage import CallBatch
from leyden.rl.credit import RolloutRewards
from leyden.rl.loss import TokenBatch

REWARDS = RolloutRewards((0.0, 1.0), 1.0, (True, True))
CALLS = CallBatch(
    value=np.array([1.0, 0.0, 0.5]),
    weight=np.ones(3),
    group=np.zeros(3, dtype=np.int64),
    rollout=np.arange(3),
    kind=np.zeros(3, dtype=np.int64),
    returns=np.zeros(3),
    baseline=np.zeros(3),
    state=np.arange(3),
)
TOKENS = TokenBatch(torch.zeros(4, requires_grad=True), torch.zeros(4), torch.ones(4), torch.tensor([0, 0, 1, 1]))
HP = Hyperparameters()
FUNCTIONS = CREDIT_FUNCTIONS | LOSS_FUNCTIONS
SIGNAL = SimpleNamespace(name="tool_failed/1")


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., Any]:
    """Writes functions into files, given their bodies, and loads them as a run does."""

    numbers = count()

    def make(key: str, takes: str, body: str) -> Callable[..., Any]:
        name = f"mine{next(numbers)}.py"
        (tmp_path / name).write_text(f"import torch\n\ndef f({takes}):\n    {body}\n")
        return load_user_function(key, f"{name}:f", str(tmp_path), FUNCTIONS[key])

    return make


@pytest.mark.parametrize(
    ("key", "takes", "body", "given", "says"),
    [
        (
            "algorithm.credit",
            "e, t",
            "return [1.0]",
            (REWARDS, HP),
            "returned 1 values for 2 calls: return one",
        ),
        ("algorithm.credit", "e, t", "return None", (REWARDS, HP), "returned a NoneType for 2 calls"),
        (
            "algorithm.credit",
            "e, t",
            "return [None, float('nan')]",
            (REWARDS, HP),
            "returned nan for call 1",
        ),
        ("algorithm.credit", "e, t", "return ['a', 1.0]", (REWARDS, HP), "returned 'a' for call 0"),
        (
            "algorithm.credit",
            "e, t",
            "return e.nothing",
            (REWARDS, HP),
            r"failed: AttributeError: .*\(mine0.py:4\)",
        ),
        (
            "algorithm.advantage",
            "c, t",
            "return c.value[1:]",
            (CALLS, HP),
            "returned 2 values for 3 calls",
        ),
        ("algorithm.advantage", "c, t", "return 1.0", (CALLS, HP), "returned a float for 3 calls"),
        (
            "algorithm.advantage",
            "c, t",
            "return [float('inf')] * 3",
            (CALLS, HP),
            "for call 0: return finite",
        ),
        (
            "algorithm.aggregation",
            "n, t",
            "return 1.0",
            ([[3], [2, 2]], HP),
            "returned a float for 2 rollouts",
        ),
        (
            "algorithm.aggregation",
            "n, t",
            "return [[1], [1]]",
            ([[3], [2, 2]], HP),
            "1 values for 2 calls of a",
        ),
        (
            "algorithm.loss",
            "x, t",
            "return -x.current",
            (TOKENS, HP),
            "a Tensor: return a tensor with the loss",
        ),
        (
            "algorithm.loss",
            "x, t",
            "return -x.current.mean(), {}",
            (TOKENS, HP),
            r"shape \(\) for 4 tokens",
        ),
        ("algorithm.loss", "x, t", "return -x.advantages, {}", (TOKENS, HP), "without a gradient"),
        ("algorithm.loss", "x, t", "return x.current / 0, {}", (TOKENS, HP), "nan or infinity"),
        (
            "algorithm.loss",
            "x, t",
            "return -x.current, {'r': 1.0}",
            (TOKENS, HP),
            "a float for the metric 'r'",
        ),
        (
            "algorithm.correction",
            "r, t",
            "return r[:2]",
            (torch.ones(4), HP),
            r"shape \(2,\) for 4 tokens",
        ),
        ("algorithm.state", "e, c", "return [1]", (None, None), "returned a list, which cannot be hashed"),
        ("signals.rule", "s", "return 'much'", (SIGNAL,), "returned 'much' for .*: return a finite number, or None"),
    ],
)
def test_an_error_says_in_one_line_what_is_wrong(
    mine: Callable[..., Any], key: str, takes: str, body: str, given: tuple[Any, ...], says: str
) -> None:
    with pytest.raises(TrainingError, match=says) as error:
        mine(key, takes, body)(*given)
    assert str(error.value).startswith(f"`{key}`") and "\n" not in str(error.value)


def test_a_correct_value_is_passed_on(mine: Callable[..., Any]) -> None:
    assert mine("algorithm.credit", "e, t", "return [None, 2]")(REWARDS, HP) == [None, 2]
    assert mine("algorithm.aggregation", "n, t", "return [[0.5], [1, 2]]")([[3], [2, 2]], HP) == [
        [0.5],
        [1, 2],
    ]
    losses, metrics = mine("algorithm.loss", "x, t", "return -x.current, {'r': x.proximal}")(TOKENS, HP)
    assert losses.shape == metrics["r"].shape == (4,)
    assert mine("algorithm.state", "e, c", "return ('a', 1)")(None, None) == ("a", 1)
    assert mine("signals.rule", "s", "return None")(None) is None


@pytest.mark.parametrize("takes", ["rewards", "rewards, hyperparameters, more", "*, rewards, hyperparameters"])
def test_a_function_with_a_wrong_signature_is_refused_before_any_work(mine: Callable[..., Any], takes: str) -> None:
    with pytest.raises(
        ConfigError, match=r"`algorithm\.credit`: 'mine0.py:f' is called with \(rewards, hyperparameters\)"
    ):
        mine("algorithm.credit", takes, "return []")


def test_its_file_may_create_a_model_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    text = "from openai import OpenAI\nclient = OpenAI()\n\ndef worth(signal):\n    return 0.5\n"
    (tmp_path / "with_client.py").write_text(text)
    assert (
        load_user_function("signals.rule", "with_client.py:worth", str(tmp_path), FUNCTIONS["signals.rule"])(None)
        == 0.5
    )
    assert "OPENAI_API_KEY" not in os.environ
