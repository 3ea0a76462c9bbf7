"""A run goes on from a checkpoint as if it had never stopped; a checkpoint is whole or not there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples
from transformers import AutoModelForCausalLM

from leyden.config import AdapterConfig
from leyden.records import DEFAULT_POLICY
from leyden.trainer.checkpoint import (
    Checkpoints,
    TrainerState,
    checkpoint_steps,
    latest_checkpoint,
    read_state,
    restore_checkpoint,
)
from leyden.trainer.policy.loading import ModelSource
from leyden.trainer.policy.objective import OldLogprobs
from leyden.trainer.policy.policy import Policy

SPARK = ModelSource("spark", Path(__file__).parents[2] / "src/leyden/models/spark")


def update(policy: Policy, seed: int) -> None:
    policy.step = seed + 1
    metrics = policy.accumulate(some_samples(seed=seed), OldLogprobs(), OBJECTIVE)
    policy.apply(metrics.grad_norm)


def weights(policy: Policy) -> torch.Tensor:
    critic = policy.critic.parameters() if policy.critic is not None else ()
    return torch.cat([parameter.detach().flatten() for parameter in (*policy.served.parameters(), *critic)])


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"critic": True},
        {"lora": AdapterConfig(rank=2)},
        {"dtype": torch.bfloat16, "learning_rate": 1e-5},
        {"dtype": torch.bfloat16, "lora": AdapterConfig(rank=2)},
    ],
    ids=["weights", "critic", "lora", "mixed precision", "lora in mixed precision"],
)
def test_resuming_equals_never_having_stopped(tmp_path: Path, more: dict[str, Any]) -> None:
    training = {"schedule": "cosine", "steps": 6, "warmup_steps": 2, **more}
    undisturbed = small_policy(**training)
    checkpoints = Checkpoints(tmp_path, SPARK, keep=2)
    for seed in range(3):
        update(undisturbed, seed)
    checkpoints.save(undisturbed, TrainerState(step=3, position=48, version=3))
    for seed in range(3, 6):
        update(undisturbed, seed)

    again = small_policy(seed=0 if "lora" in more else 9, **training)  # LoRA goes on beside the same frozen weights
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    assert restore_checkpoint(folder, again) == TrainerState(step=3, position=48, version=3)
    for seed in range(3, 6):
        update(again, seed)
    assert torch.equal(weights(again), weights(undisturbed))
    for name, trained in undisturbed.trained.items():
        assert torch.equal(again.trained[name], trained), name
    assert again.learning_rate == undisturbed.learning_rate


def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path: Path) -> None:
    policy = small_policy()
    update(policy, 0)
    folder = Checkpoints(tmp_path, SPARK, keep=1).save(policy, TrainerState(step=1))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.state_dict()["model.norm.weight"], policy.model.state_dict()["model.norm.weight"])
    assert (folder / "tokenizer.json").exists()


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    policy = small_policy()
    update(policy, 0)
    checkpoints = Checkpoints(tmp_path, SPARK, keep=2)
    for step in range(1, 7):
        checkpoints.save(policy, TrainerState(step=step, best_step=min(step, 2)))
    assert checkpoint_steps(tmp_path) == [2, 5, 6]
    checkpoints.save(policy, TrainerState(step=7, kept_step=5))  # which is kept because the run collapsed after it
    assert checkpoint_steps(tmp_path) == [5, 6, 7]
    assert checkpoints.newest == 7


def test_what_was_cut_short_is_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy()
    update(policy, 0)
    checkpoints = Checkpoints(tmp_path, SPARK, keep=2)
    checkpoints.save(policy, TrainerState(step=1))

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("leyden.trainer.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="No space"):
        checkpoints.save(policy, TrainerState(step=2))
    assert checkpoint_steps(tmp_path) == [1]
    monkeypatch.undo()
    checkpoints.save(policy, TrainerState(step=2))
    assert checkpoint_steps(tmp_path) == [1, 2]
    assert read_state(tmp_path / "step-2").step == 2


def test_the_checkpoints_of_policies_are_apart(tmp_path: Path) -> None:
    policy = small_policy()
    Checkpoints(tmp_path, SPARK, keep=2).save(policy, TrainerState(step=1))
    Checkpoints(tmp_path, SPARK, 2, "critic").save(policy, TrainerState(step=2, policy="critic"))
    assert checkpoint_steps(tmp_path) == [1] and checkpoint_steps(tmp_path, "critic") == [2]
    folder = latest_checkpoint(tmp_path, "critic")
    assert folder == tmp_path / "critic" / "step-2"
    assert restore_checkpoint(folder, policy).policy == "critic"


def test_a_state_without_a_policy_is_of_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"step": 4, "position": 9, "version": 4}')
    assert read_state(tmp_path) == TrainerState(step=4, position=9, version=4, policy=DEFAULT_POLICY)
