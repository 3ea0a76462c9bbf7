"""Checkpoints: each is a folder that is complete or absent, from which a run resumes as if it had never stopped.

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
"""Trained parameters that are not in the model: LoRA matrices, a critic."""
_RNG = "rng"


class TrainerState(Struct, frozen=True):
    """The progress of a run, apart from its weights."""

    step: int = 0
    policy: str = DEFAULT_POLICY
    """Name of the policy that is trained."""
    position: int = 0
    """Position in the endless order of tasks."""
    version: int = 0
    """Version of the weights: the number of their updates."""
    best_step: int | None = None
    best_reward: float | None = None


class Checkpoints:
    """The checkpoints of one policy of a run: the newest few, and the best."""

    def __init__(self, run: Path, tokenizer: Path, keep: int, policy: str = DEFAULT_POLICY) -> None:
        self._folder, self._tokenizer, self._keep = checkpoint_folder(run, policy), tokenizer, keep

    def save(self, policy: Policy, state: TrainerState) -> Path:
        """Write a checkpoint, and delete those that are no longer kept."""
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
        wanted = {*sorted(_steps(self._folder))[-self._keep :], state.best_step}
        for number in _steps(self._folder):
            if number not in wanted:
                shutil.rmtree(self._folder / f"step-{number}")


def restore_checkpoint(folder: Path, policy: Policy) -> TrainerState:
    """Restore a policy and its optimiser from a checkpoint."""
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


def checkpoint_folder(run: Path, policy: str = DEFAULT_POLICY) -> Path:
    """The folder of a policy's checkpoints: the run's own for the default policy, else one of the policy's name."""
    return run if policy == DEFAULT_POLICY else run / policy


def latest_checkpoint(run: Path, policy: str = DEFAULT_POLICY) -> Path | None:
    """The checkpoint to resume from."""
    steps = checkpoint_steps(run, policy)
    return checkpoint_folder(run, policy) / f"step-{steps[-1]}" if steps else None


def read_state(folder: Path) -> TrainerState:
    """Read the state of a run at a checkpoint."""
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder} is not a checkpoint: {error}") from error


def checkpoint_steps(run: Path, policy: str = DEFAULT_POLICY) -> list[int]:
    """The steps of which a policy has checkpoints."""
    return _steps(checkpoint_folder(run, policy))


def _steps(folder: Path) -> list[int]:
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(int(name[1]) for path in entries if (name := _NAME.fullmatch(path.name)) and (path / _STATE).exists())


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model's tokenizer."""
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
    """Write files to disk before the folder gets its name."""
    for path in (*folder.iterdir(), folder) if inside else (folder,):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
