"""`leyden export`: writes the weights of a run as a folder that `transformers` loads, in the original precision."""

from pathlib import Path
from shutil import copyfile

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from leyden.checkpoint_folders import checkpoint_folder, checkpoint_steps
from leyden.config import ConfigError
from leyden.local.run_folder import stored_config
from leyden.trainer.checkpoint import read_state, tokenizer_files
from leyden.trainer.checkpoint_files import find_damage
from leyden.trainer.policy.model_source import find_model


def export(run: Path, to: Path, which: str = "best") -> Path:
    """Write the best, the last or a numbered checkpoint of a run's policy into a new folder. Returns the checkpoint."""
    checkpoint = choose_checkpoint(run, which)
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to} is not empty: name a new folder with --to")
    config = stored_config(run)
    origin = AutoConfig.from_pretrained(find_model(config.model, config.base).folder).dtype
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=origin or torch.float32)
    model.save_pretrained(to)
    for file in tokenizer_files(checkpoint):
        copyfile(file, to / file.name)
    ordinary = (to / "config.json").stat().st_mode  # safetensors writes files that only their owner may read
    for file in to.iterdir():
        file.chmod(ordinary)
    return checkpoint


def choose_checkpoint(run: Path, which: str) -> Path:
    """Return the folder of the best, the last or a numbered checkpoint of the policy that a run trains."""
    if not (run / "config.toml").is_file():
        raise ConfigError(f"there is no run {run.name!r} in {run.parent}{_known_runs(run.parent)}")
    policy = stored_config(run).policy
    folder, steps = checkpoint_folder(run, policy), checkpoint_steps(run, policy)
    if not steps:
        raise ConfigError(f"{run} has no checkpoint yet: train it for `checkpoints.every` steps, or to its end")
    if which == "last":
        step = steps[-1]
    elif which == "best":
        best = read_state(folder / f"step-{steps[-1]}").best_step
        if best == 0:
            raise ConfigError(
                "no checkpoint is better than the model before training: take the last one with --step last"
            )
        step = steps[-1] if best is None else best
    else:
        number = which.removeprefix("step-")
        if not number.isdigit():
            raise ConfigError(f"--step {which}: write best, last, or the number of a step")
        step = int(number)
    if step not in steps:
        raise ConfigError(f"{run} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    checkpoint = folder / f"step-{step}"
    if (damage := find_damage(checkpoint)) is not None:
        raise ConfigError(f"the checkpoint {checkpoint} is damaged: {damage}; name another with --step")
    return checkpoint


def _known_runs(home: Path) -> str:
    known = sorted(path.parent.name for path in home.glob("*/config.toml"))
    return f"; there are {', '.join(known)}" if known else ""
