"""Checkpoints: each is a folder that is complete or absent, from which a run resumes as if it had never stopped.

`step-N` is a Hugging Face folder (weights as they are trained, the model's tokenizer), with the optimiser's moments,
the state of the training and checksums. With several training devices the tensors are sharded (`sharded_files.py`);
either kind is restored on any number of devices. Each policy of a run has its own (`checkpoint_files.py`). Rollouts
sampled after the last checkpoint are in the store; a resumed run trains on them again. A run does not resume from a
damaged checkpoint but from the one before it.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from leyden.config import CheckpointConfig, ConfigError
from leyden.learner.errors import TrainingError
from leyden.learner.loading import read_model
from leyden.learner.moments import (
    BESIDE_FILE,
    MOMENT_KEYS,
    MOMENTS_FILE,
    beside_and_moments,
    make_moments,
    read_beside,
    read_moments,
)
from leyden.learner.policy import Policy
from leyden.learner.protocol import TrainerState
from leyden.learner.sharded_files import is_sharded, read_shards
from leyden.learner.snapshot import RNG, Snapshot
from leyden.models.source import ModelSource
from leyden.rendering.tokenizer import RENDERER_FILE
from leyden.runs.checkpoint_files import (
    STATE_FILE,
    checkpoint_folder,
    checkpoint_steps,
    find_damage,
    latest_checkpoint,
    needed_steps,
    write_checksums,
)

_CONFIG = "config.json"


class Checkpoints:
    """The checkpoints of one policy of a run: the newest few, and the best."""

    def __init__(
        self,
        run: Path,
        policy: str,
        model: ModelSource,
        kept: CheckpointConfig,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`model` is the one that the training started from; its tokenizer belongs to every checkpoint."""
        self._folder, self._model, self._kept = checkpoint_folder(run, policy), model, kept
        self._run, self._policy, self._warn = run, policy, warn
        self._versions = {0: 0}
        """By step, the versions of checkpoints that were found whole: to read one takes long, self-play asks often."""

    def snapshot(self, policy: Policy, state: TrainerState) -> Snapshot:
        """Return what a checkpoint is written from; it shares the policy's memory."""
        return Snapshot.of(policy, state, self._kept.optimiser)

    def write(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint, and delete those that are no longer kept."""
        with self.writing(snapshot.state) as folder:
            snapshot.model.save_pretrained(folder, state_dict=dict(snapshot.weights))  # which it empties
            save_file(dict(snapshot.extra), folder / BESIDE_FILE)
            save_file(dict(snapshot.optimiser), folder / MOMENTS_FILE)
        return self._folder / f"step-{snapshot.state.step}"

    @contextmanager
    def writing(self, state: TrainerState) -> Iterator[Path]:
        """Yield a new folder for the tensors of a checkpoint, which is complete after this context or not there."""
        final = self._folder / f"step-{state.step}"
        temporary = self._folder / f".step-{state.step}.draft"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            self._complete(state, temporary)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)  # it takes room on a disk that may be full
            if isinstance(error, SafetensorError):
                raise _as_os_error(error) from error
            raise
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(self._folder, inside=False)
        self._delete_old()

    def _complete(self, state: TrainerState, temporary: Path) -> None:
        if not (temporary / _CONFIG).exists():
            shutil.copyfile(self._model.folder / _CONFIG, temporary / _CONFIG)
        for file in tokenizer_files(self._model.folder):
            shutil.copyfile(file, temporary / file.name)
        if "/" in self._model.name:  # as every known one
            from leyden.rendering.known_models import remember_known_model  # slow to import

            remember_known_model(temporary, self._model.name)
        (temporary / STATE_FILE).write_bytes(msgspec.json.encode(state))
        write_checksums(temporary)
        _sync(temporary)

    def restore_latest(self, policy: Policy) -> TrainerState:
        """Restore a policy from its newest checkpoint that is whole; return the first state if there is none."""
        folder = self.find_latest()
        return TrainerState(policy=self._policy) if folder is None else restore_checkpoint(folder, policy)

    def find_latest(self) -> Path | None:
        """Return the newest checkpoint that is whole.

        Damaged checkpoints are renamed to `step-N.damaged` and reported; what a killed process was writing is deleted.
        """
        for draft in self._folder.glob(".step-*.draft"):
            shutil.rmtree(draft)
        damaged: list[Path] = []
        while (folder := latest_checkpoint(self._run, self._policy)) is not None:
            if (damage := find_damage(folder)) is None:
                return folder
            aside = folder.with_name(f"{folder.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            damaged.append(folder.rename(aside))
            self._warn(
                f"the checkpoint {folder.name} is damaged ({damage}): it is now {aside}, and the one before it is used"
            )
        if damaged:
            raise ConfigError(f"every checkpoint in {self._run} is damaged: run the command again to begin at step 0")
        return None

    def version_of(self, step: int) -> int:
        """Return the version of the weights of a checkpoint, of step 0 that before training."""
        if step not in self._versions:
            folder = self._folder / f"step-{step}"
            if (damage := find_damage(folder)) is not None:
                raise TrainingError(
                    f"the checkpoint {folder} is damaged ({damage}), so it cannot be served: if all steps are trained, "
                    "evaluate another with `leyden eval`"
                )
            self._versions[step] = read_state(folder).version
        return self._versions[step]

    def load(self, policy: Policy, step: int) -> None:
        """Write the weights of a checkpoint into a policy, of step 0 those before training; the optimiser stays."""
        folder = self.folder_of(step)
        if step == 0:
            policy.load_initial_weights(_read_state(folder, policy))
        else:
            _load_weights(folder, policy)

    def folder_of(self, step: int) -> Path:
        """Return the folder with the weights of a step: a checkpoint, or the model that training started with."""
        return self._model.folder if step == 0 else self._folder / f"step-{step}"

    def _delete_old(self) -> None:
        """Keep the newest few, since a run may have to resume from any of them, and the checkpoints that they need."""
        steps = checkpoint_steps(self._run, self._policy)
        for step in {*steps} - needed_steps(self._folder, steps[-self._kept.keep :]):
            shutil.rmtree(self._folder / f"step-{step}")


def restore_checkpoint(folder: Path, policy: Policy) -> TrainerState:
    """Restore a policy and its optimiser from a checkpoint."""
    policy.optimiser.state.clear()
    state = read_state(folder)
    _load_weights(folder, policy)
    if is_sharded(folder):
        make_moments(policy, folder)
        read_shards(beside_and_moments(policy), folder)
        return state
    moments = read_moments(folder)
    torch.set_rng_state(moments.pop(RNG))
    restore_moments(policy.optimiser, policy.parameters, moments)
    return state


def _load_weights(folder: Path, policy: Policy) -> None:
    policy.load_weights(_read_state(folder, policy))
    if is_sharded(folder):
        read_shards(beside_and_moments(policy, moments=False), folder)
        return
    extra = read_beside(folder)
    with torch.no_grad():
        for name, parameter in policy.extra_parameters.items():
            parameter.copy_(extra[name])


def restore_moments(
    optimiser: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]
) -> None:
    """Give the optimiser its moments and step counts, on the devices of its parameters: fused kernels read both."""
    for name, parameter in parameters.items():
        if f"{name}.step" not in moments:  # it has had no update yet, or moments are not saved
            continue
        optimiser.state[parameter] = {key: moments[f"{name}.{key}"].to(parameter.device) for key in MOMENT_KEYS}


def _read_state(folder: Path, policy: Policy) -> dict[str, torch.Tensor]:
    precision = torch.promote_types(policy.served.dtype, torch.float32)  # that of the master weights
    weights: dict[str, torch.Tensor] = read_model(folder, precision).state_dict()
    return weights


def read_state(folder: Path) -> TrainerState:
    """Read the state of a run at a checkpoint."""
    try:
        return msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{folder} is not a checkpoint: {error}") from error


def _as_os_error(error: SafetensorError) -> Exception:
    """Return an error of writing safetensors as the `OSError` that its text names, if it names one."""
    named = re.search(r"os error (\d+)\)", str(error))
    return error if named is None else OSError(int(named[1]), str(error))


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a model's tokenizer, with the name that its renderer is chosen by if it is remembered."""
    names = (RENDERER_FILE, "tokenizer", "special_tokens", "chat_template", "vocab", "merges", "added_tokens")
    return [path for path in sorted(folder.iterdir()) if path.name.startswith(names) and path.is_file()]


def _sync(folder: Path, inside: bool = True) -> None:
    """Write files to disk before the folder gets its name."""
    for path in (*folder.iterdir(), folder) if inside else (folder,):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
