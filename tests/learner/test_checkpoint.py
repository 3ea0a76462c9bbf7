"""A run goes on from a checkpoint as if it had never stopped; a checkpoint is whole or not there."""

import errno
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples
from transformers import AutoModelForCausalLM

from leyden.config import AdapterConfig, CheckpointConfig, ConfigError
from leyden.learner.checkpoint import Checkpoints, read_state, restore_checkpoint, restore_moments
from leyden.learner.errors import TrainingError
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs, PooledVersion, TrainerState
from leyden.models.source import ModelSource
from leyden.records import DEFAULT_POLICY
from leyden.runs.checkpoint_files import STATE_FILE, checkpoint_policies, checkpoint_steps, latest_checkpoint

SPARK = ModelSource("spark", Path(__file__).parents[2] / "src/leyden/models/spark")
KEEP_ONE = CheckpointConfig(keep=1)


def update(policy: Policy, seed: int) -> None:
    policy.step = seed + 1
    metrics = policy.accumulate(some_samples(seed=seed), OldLogprobs(), OBJECTIVE)
    policy.apply(metrics.grad_norm)


def restore_latest(
    run: Path, policy: Policy, name: str = DEFAULT_POLICY, warn: Callable[[str], None] = pytest.fail
) -> TrainerState:
    return Checkpoints(run, name, SPARK, CheckpointConfig(), warn).restore_latest(policy)


def save(checkpoints: Checkpoints, policy: Policy, state: TrainerState) -> Path:
    return checkpoints.write(checkpoints.snapshot(policy, state))


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
    training = {"schedule": "cosine", "steps": 4, "warmup_steps": 2, **more}
    undisturbed = small_policy(**training)
    checkpoints = Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, CheckpointConfig())
    for seed in range(2):
        update(undisturbed, seed)
    copy = checkpoints.snapshot(undisturbed, TrainerState(step=2, position=32, version=2)).copy()
    for seed in range(2, 4):
        update(undisturbed, seed)
    assert copy is not None
    checkpoints.write(copy)  # while or after training has gone on

    again = small_policy(seed=0 if "lora" in more else 9, **training)  # LoRA goes on beside the same frozen weights
    folder = latest_checkpoint(tmp_path, DEFAULT_POLICY)
    assert folder is not None
    assert restore_checkpoint(folder, again) == TrainerState(step=2, position=32, version=2)
    for seed in range(2, 4):
        update(again, seed)
    assert torch.equal(weights(again), weights(undisturbed))
    for name, trained in undisturbed.trained.items():
        assert torch.equal(again.trained[name], trained), name
    assert again.learning_rate == undisturbed.learning_rate


def test_moments_and_step_counts_are_restored_on_the_device_of_the_parameter() -> None:
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    optimiser = torch.optim.AdamW([parameter])
    saved = {"w.exp_avg": torch.zeros(2), "w.exp_avg_sq": torch.zeros(2), "w.step": torch.tensor(3.0)}
    restore_moments(optimiser, {"w": parameter}, saved)
    assert {key: value.device.type for key, value in optimiser.state[parameter].items()} == {
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
        "step": "meta",
    }


def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path: Path) -> None:
    policy = small_policy()
    update(policy, 0)
    folder = save(Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, KEEP_ONE), policy, TrainerState(step=1))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.state_dict()["model.norm.weight"], policy.model.state_dict()["model.norm.weight"])
    assert (folder / "tokenizer.json").exists()


def test_a_checkpoint_without_moments_restores_the_weights_and_starts_a_new_optimiser(tmp_path: Path) -> None:
    policy = small_policy()
    update(policy, 0)
    whole = save(Checkpoints(tmp_path / "whole", DEFAULT_POLICY, SPARK, KEEP_ONE), policy, TrainerState(step=1))
    checkpoints = Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, CheckpointConfig(keep=1, optimiser=False))
    folder = save(checkpoints, policy, TrainerState(step=1))
    assert sizes(folder) < sizes(whole) / 2
    again = small_policy()
    assert restore_latest(tmp_path, again).step == 1
    assert all(torch.equal(again.trained[name], trained) for name, trained in policy.trained.items())
    assert not again.optimiser.state


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    policy = small_policy()
    update(policy, 0)
    checkpoints = Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, CheckpointConfig())
    for step in range(1, 7):
        save(checkpoints, policy, TrainerState(step=step, best_step=min(step, 2)))
    assert checkpoint_steps(tmp_path, DEFAULT_POLICY) == [2, 5, 6]


def test_a_run_that_resumes_from_the_checkpoint_before_the_newest_has_all_that_it_needs(tmp_path: Path) -> None:
    """It does if the newest is damaged, or another policy was killed before it had saved the same step."""
    policy = small_policy()
    checkpoints = Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, CheckpointConfig())
    pooled = {"opponent": (PooledVersion(0), PooledVersion(3))}
    for step in range(1, 7):
        save(checkpoints, policy, TrainerState(step=step, best_step=1, kept_step=2, pools=pooled))
    save(checkpoints, policy, TrainerState(step=7, best_step=7, pools={"opponent": (PooledVersion(7),)}))
    assert checkpoint_steps(tmp_path, DEFAULT_POLICY) == [1, 2, 3, 6, 7]
    save(checkpoints, policy, TrainerState(step=8, best_step=7, pools={"opponent": (PooledVersion(7),)}))
    assert checkpoint_steps(tmp_path, DEFAULT_POLICY) == [7, 8]


def test_training_goes_on_beside_a_checkpoint_that_was_damaged_since(tmp_path: Path) -> None:
    policy, checkpoints = small_policy(), Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, CheckpointConfig(keep=2))
    cut_short(save(checkpoints, policy, TrainerState(step=1)) / STATE_FILE)
    for step in (2, 3):
        save(checkpoints, policy, TrainerState(step=step))
    assert checkpoint_steps(tmp_path, DEFAULT_POLICY) == [2, 3]


def test_what_was_cut_short_is_not_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy()
    update(policy, 0)
    checkpoints = Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, CheckpointConfig())
    save(checkpoints, policy, TrainerState(step=1))

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("leyden.learner.checkpoint.save_file", fail)
    with pytest.raises(OSError, match="No space"):
        save(checkpoints, policy, TrainerState(step=2))
    assert checkpoint_steps(tmp_path, DEFAULT_POLICY) == [1]
    monkeypatch.undo()
    save(checkpoints, policy, TrainerState(step=2))
    assert checkpoint_steps(tmp_path, DEFAULT_POLICY) == [1, 2]
    assert read_state(tmp_path / "step-2").step == 2


def test_the_checkpoints_of_policies_are_apart(tmp_path: Path) -> None:
    policy = small_policy()
    save(Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, CheckpointConfig()), policy, TrainerState(step=1))
    other = small_policy(seed=9)
    save(Checkpoints(tmp_path, "critic", SPARK, CheckpointConfig()), other, TrainerState(step=2, policy="critic"))
    assert checkpoint_steps(tmp_path, DEFAULT_POLICY) == [1] and checkpoint_steps(tmp_path, "critic") == [2]
    assert checkpoint_policies(tmp_path) == [DEFAULT_POLICY, "critic"]
    assert latest_checkpoint(tmp_path, "critic") == tmp_path / "policies" / "critic" / "step-2"
    assert restore_latest(tmp_path, policy, "critic") == TrainerState(step=2, policy="critic")
    assert torch.equal(weights(policy), weights(other))
    assert restore_latest(tmp_path, policy, "actor") == TrainerState(policy="actor")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "beside.safetensors", "optimiser.safetensors", "state.json", "checksums.json"]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(tmp_path: Path, name: str) -> None:
    policy = small_policy(critic=True)
    checkpoints = Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, CheckpointConfig())
    found: list[torch.Tensor] = []
    for step in (1, 2):
        update(policy, step)
        save(checkpoints, policy, TrainerState(step=step, version=step))
        found.append(weights(policy).clone())
    cut_short(tmp_path / "step-2" / name)
    said: list[str] = []
    again = small_policy(seed=9, critic=True)
    assert restore_latest(tmp_path, again, warn=said.append) == TrainerState(step=1, version=1)
    assert torch.equal(weights(again), found[0])
    (message,) = said
    assert message.startswith("the checkpoint step-2 is damaged (") and "\n" not in message
    assert (tmp_path / "step-2.damaged").exists() and checkpoint_steps(tmp_path, DEFAULT_POLICY) == [1]


def test_the_weights_of_a_best_checkpoint_that_is_gone_are_refused_with_what_to_do(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, KEEP_ONE)
    with pytest.raises(TrainingError, match=r"step-3 is damaged \(its folder is missing\).* `leyden eval`"):
        checkpoints.version_of(3)


def test_a_checkpoint_that_is_served_again_and_again_is_read_once_to_find_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, KEEP_ONE)
    save(checkpoints, small_policy(), TrainerState(step=3, version=2))
    read: list[Path] = []
    monkeypatch.setattr("leyden.learner.checkpoint.find_damage", lambda folder: read.append(folder))
    assert [checkpoints.version_of(step) for step in (3, 0, 3)] == [2, 0, 2]
    assert read == [tmp_path / "step-3"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, AdapterConfig(rank=2)], ids=["weights", "lora"])
def test_the_weights_of_step_0_are_those_before_training(
    tmp_path: Path, lora: AdapterConfig | None, dtype: torch.dtype
) -> None:
    policy = small_policy(lora=lora, dtype=dtype)
    policy.served.save_pretrained(tmp_path / "model")
    before, logprobs = weights(policy).clone(), policy.logprobs(some_samples())
    update(policy, 0)
    assert not torch.equal(weights(policy), before)
    source = ModelSource("small", tmp_path / "model")
    checkpoints = Checkpoints(tmp_path, DEFAULT_POLICY, source, CheckpointConfig())
    assert checkpoints.version_of(0) == 0
    checkpoints.load(policy, 0)
    assert torch.equal(weights(policy), before)
    assert all(torch.equal(now, then) for now, then in zip(policy.logprobs(some_samples()), logprobs, strict=True))
    adapter = policy.adapter_weights()
    assert adapter is None or not any(each.any() for name, each in adapter.tensors.items() if "lora_B" in name)


def test_a_flipped_byte_is_found_and_a_run_without_a_whole_checkpoint_does_not_begin_anew_unasked(
    tmp_path: Path,
) -> None:
    save(Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, KEEP_ONE), small_policy(), TrainerState(step=1))
    flip_a_byte(tmp_path / "step-1" / "model.safetensors")
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged"):
        restore_latest(tmp_path, small_policy(), warn=said.append)
    assert "model.safetensors is not what was written" in said[0]


def test_a_full_disk_leaves_the_checkpoint_before_and_no_draft(tmp_path: Path) -> None:
    policy, checkpoints = small_policy(), Checkpoints(tmp_path, DEFAULT_POLICY, SPARK, KEEP_ONE)
    save(checkpoints, policy, TrainerState(step=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as full:
            save(checkpoints, policy, TrainerState(step=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    save(checkpoints, policy, TrainerState(step=2))
    assert checkpoint_steps(tmp_path, DEFAULT_POLICY) == [2]
