"""A function of the user's own that errs is named, in one line, with what it should have given."""

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
from leyden.rl.advantage import CallBatch
from leyden.rl.credit import RolloutRewards
from leyden.rl.loss import TokenBatch
from leyden.trainer.algorithm.user_functions import load_user_function
from leyden.trainer.errors import TrainingError

EARNED = RolloutRewards((0.0, 1.0), 1.0, (True, True))
CALLS = CallBatch(
    value=np.array([1.0, 0.0, 0.5]),
    weight=np.ones(3),
    group=np.zeros(3, dtype=np.int64),
    rollout=np.arange(3),
    part=np.zeros(3, dtype=np.int64),
    returns=np.zeros(3),
    baseline=np.zeros(3),
    state=np.arange(3),
)
TOKENS = TokenBatch(torch.zeros(4, requires_grad=True), torch.zeros(4), torch.ones(4), torch.tensor([0, 0, 1, 1]))
TERMS = Hyperparameters()
SIGNAL = SimpleNamespace(name="tool_failed/1")


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., Any]:
    """Makes a function of the text of its body, as a user's file has it."""

    numbers = count()

    def make(key: str, takes: str, body: str) -> Callable[..., Any]:
        name = f"mine{next(numbers)}.py"
        (tmp_path / name).write_text(f"import torch\n\ndef f({takes}):\n    {body}\n")
        return load_user_function(key, f"{name}:f", str(tmp_path))

    return make


@pytest.mark.parametrize(
    ("key", "takes", "body", "given", "says"),
    [
        ("algorithm.credit", "e, t", "return [1.0]", (EARNED, TERMS), "gave 1 values for 2 calls: return one for each"),
        ("algorithm.credit", "e, t", "return None", (EARNED, TERMS), "gave a NoneType for 2 calls"),
        ("algorithm.credit", "e, t", "return [None, float('nan')]", (EARNED, TERMS), "gave nan for call 1"),
        ("algorithm.credit", "e, t", "return ['a', 1.0]", (EARNED, TERMS), "gave 'a' for call 0"),
        ("algorithm.credit", "e, t", "return e.nothing", (EARNED, TERMS), r"failed: AttributeError: .*\(mine0.py:4\)"),
        ("algorithm.advantage", "c, t", "return c.value[1:]", (CALLS, TERMS), "gave 2 values for 3 calls"),
        ("algorithm.advantage", "c, t", "return 1.0", (CALLS, TERMS), "gave a float for 3 calls"),
        ("algorithm.advantage", "c, t", "return [float('inf')] * 3", (CALLS, TERMS), "for call 0: return finite"),
        ("algorithm.aggregation", "n, t", "return 1.0", ([[3], [2, 2]], TERMS), "gave a float for 2 rollouts"),
        ("algorithm.aggregation", "n, t", "return [[1], [1]]", ([[3], [2, 2]], TERMS), "1 values for 2 calls of a"),
        ("algorithm.loss", "x, t", "return -x.current", (TOKENS, TERMS), "gave a Tensor: return the losses"),
        ("algorithm.loss", "x, t", "return -x.current.mean(), {}", (TOKENS, TERMS), r"shape \(\) for 4 tokens"),
        ("algorithm.loss", "x, t", "return -x.advantages, {}", (TOKENS, TERMS), "without a gradient"),
        ("algorithm.loss", "x, t", "return x.current / 0, {}", (TOKENS, TERMS), "not a number"),
        ("algorithm.loss", "x, t", "return -x.current, {'r': 1.0}", (TOKENS, TERMS), "a float for the metric 'r'"),
        ("algorithm.correction", "r, t", "return r[:2]", (torch.ones(4), TERMS), r"shape \(2,\) for 4 tokens"),
        ("algorithm.state", "e, c", "return [1]", (None, None), "gave a list, which cannot be hashed"),
        ("signals.rule", "s", "return 'much'", (SIGNAL,), "gave 'much' for .*: return a finite number, or None"),
    ],
)
def test_what_it_does_wrong_is_said_in_one_line(
    mine: Callable[..., Any], key: str, takes: str, body: str, given: tuple[Any, ...], says: str
) -> None:
    with pytest.raises(TrainingError, match=says) as error:
        mine(key, takes, body)(*given)
    assert str(error.value).startswith(f"`{key}`") and "\n" not in str(error.value)


def test_what_it_does_right_is_passed_on(mine: Callable[..., Any]) -> None:
    assert mine("algorithm.credit", "e, t", "return [None, 2]")(EARNED, TERMS) == [None, 2]
    assert mine("algorithm.aggregation", "n, t", "return [[0.5], [1, 2]]")([[3], [2, 2]], TERMS) == [[0.5], [1, 2]]
    losses, metrics = mine("algorithm.loss", "x, t", "return -x.current, {'r': x.proximal}")(TOKENS, TERMS)
    assert losses.shape == metrics["r"].shape == (4,)
    assert mine("algorithm.state", "e, c", "return ('a', 1)")(None, None) == ("a", 1)
    assert mine("signals.rule", "s", "return None")(None) is None


@pytest.mark.parametrize("takes", ["rewards", "rewards, hyperparameters, more", "*, rewards, hyperparameters"])
def test_one_that_cannot_be_called_with_what_it_gets_is_refused_before_any_work(
    mine: Callable[..., Any], takes: str
) -> None:
    with pytest.raises(
        ConfigError, match=r"`algorithm\.credit`: 'mine0.py:f' is called with \(rewards, hyperparameters\)"
    ):
        mine("algorithm.credit", takes, "return []")


def test_it_may_stand_in_a_file_that_makes_a_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    text = "from openai import OpenAI\nclient = OpenAI()\n\ndef worth(signal):\n    return 0.5\n"
    (tmp_path / "with_client.py").write_text(text)
    assert load_user_function("signals.rule", "with_client.py:worth", str(tmp_path))(None) == 0.5
    assert "OPENAI_API_KEY" not in os.environ
