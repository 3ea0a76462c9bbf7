"""A reward is learned; the demo learns, and shuffled rewards teach nothing; every algorithm learns a longer task."""

import asyncio
import shutil
from pathlib import Path

import pytest
from tables import train_table
from trainings import Training

from leyden.config import Config, override, read_config, read_file
from leyden.local.evaluate import evaluate_model
from leyden.local.train import TrainingResult, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "calc_plain"
REDUCED = ("training.steps=16", "training.tasks_per_step=8", "evaluation.every=0", "training.schedule=constant")
MARGIN = 0.15
TAUGHT = 0.4
"""How much more a dozen steps of any algorithm make of the task of two steps; about 0.7 is usual."""
ALGORITHMS = {
    "grpo": (),
    "rloo": ("algorithm.loss=reinforce",),
    "reinforce_pp": (
        "algorithm.credit=discounted",
        *("training.tasks_per_step=64", "training.group_size=1", "training.min_group=1"),
    ),
    "gigpo": ("algorithm.credit=discounted", "algorithm.gamma=0.95"),
    "ppo": ("algorithm.credit=gae",),
}
DIGITS = """
def reward(task, result):
    return sum(one.isdigit() for one in result) / max(1, len(result))
"""
SHUFFLED = """
import random

def reward(task, result):
    return float(random.random() < 0.3)
"""


def configured(folder: Path, *settings: str) -> Config:
    shutil.copytree(EXAMPLE, folder, dirs_exist_ok=True)
    (folder / "shuffled.py").write_text(SHUFFLED)
    return read_config(override(read_file(folder / "calc.toml"), [f"home={folder / 'runs'}", *settings]))


def run(config: Config) -> TrainingResult:
    return asyncio.run(train(config))


def measure(config: Config, trained: TrainingResult, tasks: str | None = None) -> float:
    """What the last checkpoint is worth by the true reward."""
    measured = asyncio.run(evaluate_model(config, str(trained.checkpoint), tasks))
    assert measured.reward is not None
    return measured.reward


def test_a_reward_for_digits_is_learned_in_a_few_steps(tmp_path: Path) -> None:
    (tmp_path / "digits.py").write_text(DIGITS)
    settings = ("training.steps=6", "training.tasks_per_step=4", "training.group_size=8", "evaluation.every=0")
    training = Training(tmp_path, "reward=digits.py:reward", "held_out=4", "evaluation.rollouts=4", *settings)
    training.finish()
    before, *_, after = [row["held_out/reward"] for row in training.metrics() if "held_out/reward" in row]
    assert before < 0.6 and after > before + 0.3  # about 0.3 and 1.0 are usual


@pytest.mark.slow
def test_a_reduced_demo_learns(tmp_path: Path) -> None:
    trained = run(configured(tmp_path, *REDUCED))
    assert trained.before is not None and trained.after is not None
    assert trained.before < 0.45
    assert trained.after > trained.before + MARGIN


@pytest.mark.slow  # tests/rl/test_unbiased.py proves what the gradient is on average
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    config = configured(tmp_path, *REDUCED)
    trained = run(configured(tmp_path, *REDUCED, "reward=shuffled.py:reward", "held_out=0"))
    before = asyncio.run(evaluate_model(config)).reward
    assert before is not None
    assert measure(config, trained) < before + MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_whole_demo_reaches_its_goal_whatever_the_seed(seed: int, tmp_path: Path) -> None:
    config = configured(tmp_path, f"seed={seed}", f"run=demo-{seed}")
    trained = run(config)
    assert trained.before is not None and trained.after is not None
    assert 0.15 < trained.before < 0.45
    assert trained.after >= 0.85  # measured on 100 tasks
    assert trained.step <= 80
    # sentences and numbers that no task had
    before = asyncio.run(evaluate_model(config, None, "unseen.jsonl")).reward
    assert before is not None
    assert measure(config, trained, "unseen.jsonl") > before + MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("advantage", ALGORITHMS)
def test_every_algorithm_learns_a_task_of_two_steps(advantage: str, tmp_path: Path) -> None:
    trained = train_table(tmp_path, f"algorithm.advantage={advantage}", *ALGORITHMS[advantage])
    assert trained.before is not None and trained.after is not None
    assert 0.05 < trained.before < 0.4
    assert trained.after > trained.before + TAUGHT
