"""`leyden export`: writes the weights of a run as a folder that `transformers` loads, in the original precision."""

from pathlib import Path
from shutil import copyfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from leyden.config import ConfigError
from leyden.local.run_folder import stored_config
from leyden.records import DEFAULT_POLICY
from leyden.trainer.checkpoint import checkpoint_folder, checkpoint_steps, read_state, tokenizer_files
from leyden.trainer.policy.loading import find_model


def export(run: Path, to: Path, which: str = "best", policy: str = DEFAULT_POLICY) -> Path:
    """Write the best, the last or a numbered checkpoint of a policy into a new folder. Returns the checkpoint."""
    folder, steps = checkpoint_folder(run, policy), checkpoint_steps(run, policy)
    if not steps:
        raise ConfigError(f"{run} has no checkpoint yet")
    if which == "last":
        step = steps[-1]
    elif which == "best":
        best = read_state(folder / f"step-{steps[-1]}").best_step
        if best == 0:
            raise ConfigError(
                "no checkpoint is better than the model before training: export the last one with --step last"
            )
        step = steps[-1] if best is None else best
    else:
        step = int(which.removeprefix("step-"))
    if step not in steps:
        raise ConfigError(f"{run} has no checkpoint of step {step}; there are {', '.join(map(str, steps))}")
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to} is not empty: name a new folder with --to")
    config = stored_config(run)
    checkpoint = folder / f"step-{step}"
    origin = AutoConfig.from_pretrained(find_model(config.model, config.base).folder).dtype
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=origin or torch.float32)
    model.save_pretrained(to)
    for file in tokenizer_files(checkpoint):
        copyfile(file, to / file.name)
    return checkpoint
