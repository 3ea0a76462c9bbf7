"""Checkpoints: a folder each, whole or not there at all, from which a run goes on as if it had never stopped.

`step-N` is a Hugging Face folder (weights as they are trained, the model's tokenizer), with the optimiser's moments and
the run's state beside. What was sampled after the last checkpoint is in the store, and is trained on again from there.
"""

import os
import re
import shutil
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from leyden.config import ConfigError
from leyden.records import DEFAULT_POLICY
from leyden.trainer.policy.policy import Policy

_NAME = re.compile(r"step-(\d+)")
_STATE = "state.json"
_OPTIMISER = "optimiser.safetensors"
_BESIDE = "beside.safetensors"
"""What is trained and is not in the model: LoRA's matrices, a critic."""
_RNG = "rng"


class TrainerState(Struct, frozen=True):
    """Where a run stands, beside its weights."""

    step: int = 0
    policy: str = DEFAULT_POLICY
    """Name of the policy that is trained."""
    position: int = 0
    """How many tasks have been drawn."""
    version: int = 0
    """Of the weights: how many updates they have had."""
    best_step: int | None = None
    best_reward: float | None = None


class Checkpoints:
    """The checkpoints of one run: the newest few, and the best."""

    def __init__(self, folder: Path, tokenizer: Path, keep: int) -> None:
        self._folder, self._tokenizer, self._keep = folder, tokenizer, keep

    def save(self, policy: Policy, state: TrainerState) -> Path:
        """Write one, and drop those that are no longer wanted."""
        final = self._folder / f"step-{state.step}"
        draft = self._folder / f".step-{state.step}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        policy.served.save_pretrained(draft, state_dict=policy.weights())
        save_file({name: each.detach().contiguous() for name, each in policy.beside.items()}, draft / _BESIDE)
        for file in tokenizer_files(self._tokenizer):
            shutil.copyfile(file, draft / file.name)
        save_file(_moments(policy), draft / _OPTIMISER)
        (draft / _STATE).write_bytes(msgspec.json.encode(state))
        _sync(draft)
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _sync(self._folder, inside=False)
        self._drop(state)
        return final

    def _drop(self, state: TrainerState) -> None:
        wanted = {*sorted(checkpoint_steps(self._folder))[-self._keep :], state.best_step}
        for number in checkpoint_steps(self._folder):
            if number not in wanted:
                shutil.rmtree(self._folder / f"step-{number}")


def restore_checkpoint(folder: Path, policy: Policy) -> TrainerState:
    """Put a policy and its optimiser where a checkpoint left them."""
    state = read_state(folder)
    precision = torch.promote_types(policy.served.dtype, torch.float32)  # that of the master weights
    policy.load_weights(AutoModelForCausalLM.from_pretrained(folder, dtype=precision).state_dict())
    beside = load_file(folder / _BESIDE)
    with torch.no_grad():
        for name, parameter in policy.beside.items():
            parameter.copy_(beside[name])
    moments = load_file(folder / _OPTIMISER)
    torch.set_rng_state(moments.pop(_RNG))
    for name, parameter in policy.parameters.items():
        if f"{name}.step" not in moments:  # it has had no update yet
            continue
        own = {key: moments[f"{name}.{key}"] for key in ("exp_avg", "exp_avg_sq", "step")}
        policy.optimiser.state[parameter] = {
            key: value if key == "step" else value.to(parameter.device) for key, value in own.items()
        }
    return state


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of a run to go on from."""
    steps = checkpoint_steps(folder)
    return folder / f"step-{steps[-1]}" if steps else None


def read_state(folder: Path) -> TrainerState:
    """Where the run stood at a checkpoint."""
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder} is no checkpoint: {error}") from error


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of which there are checkpoints."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(name[1]) for path in entries if (name := _NAME.fullmatch(path.name)) and (path / _STATE).exists())


def tokenizer_files(folder: Path) -> list[Path]:
    """What belongs to a model's tokenizer rather than to its weights."""
    names = ("tokenizer", "special_tokens", "chat_template", "vocab", "merges", "added_tokens")
    return [path for path in sorted(folder.iterdir()) if path.name.startswith(names) and path.is_file()]


def _moments(policy: Policy) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in policy.parameters.items()}
    moments = {
        f"{names[parameter]}.{key}": value.contiguous()
        for parameter, state in policy.optimiser.state.items()
        for key, value in state.items()
    }
    return {**moments, _RNG: torch.get_rng_state()}


def _sync(folder: Path, inside: bool = True) -> None:
    """What was written is on the disk before its name is."""
    for path in (*folder.iterdir(), folder) if inside else (folder,):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
