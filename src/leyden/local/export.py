"""`leyden export`: writes the weights of a run, in the original precision, as a folder that `transformers` loads."""

from pathlib import Path
from shutil import copyfile

import torch
import transformers
from transformers import AutoConfig

from leyden.config import ConfigError, policy_configs
from leyden.learner.checkpoint import tokenizer_files
from leyden.learner.loading import read_model
from leyden.local.model_card import write_card
from leyden.models.source import find_model
from leyden.runs.run_checkpoints import choose_checkpoint, choose_policy
from leyden.runs.run_folder import stored_config


def export(run: Path, to: Path, which: str = "best", policy: str | None = None) -> Path:
    """Write the best, the last or a numbered checkpoint of a run's policy into a new folder. Returns the checkpoint.

    `policy` is one of several; None: the only one.
    """
    checkpoint = choose_checkpoint(run, which, policy)
    if to.exists() and any(to.iterdir()):
        raise ConfigError(f"{to} is not empty: name a new folder with --to")
    config = policy_configs(stored_config(run))[choose_policy(run, policy)]
    origin = AutoConfig.from_pretrained(find_model(config.model, config.base).folder).dtype
    transformers.utils.logging.disable_progress_bar()
    model = read_model(checkpoint, origin or torch.float32)
    model.save_pretrained(to)
    for file in tokenizer_files(checkpoint):
        copyfile(file, to / file.name)
    write_card(run, config, checkpoint, to)
    ordinary = (to / "config.json").stat().st_mode  # safetensors writes files that only their owner may read
    for file in to.iterdir():
        file.chmod(ordinary)
    return checkpoint
