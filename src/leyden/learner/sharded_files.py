"""Sharded checkpoints: files of torch's distributed checkpoints, beside the configuration and the tokenizer of a model.

Tensors are named `weights.NAME`, `beside.NAME` (LoRA matrices, a critic) and `moments.NAME.KEY`. Any number of
processes reads them, each only what it needs.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

WEIGHTS, BESIDE, MOMENTS = "weights.", "beside.", "moments."


def is_sharded(folder: Path) -> bool:
    """Whether a folder has a sharded checkpoint."""
    return (folder / ".metadata").is_file()


def write_shards(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> None:
    """Write what all processes of a group have of some tensors. Raises the `OSError` of any of them."""
    from torch.distributed.checkpoint.api import CheckpointException  # a run on one device has no use for it
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(tensors), checkpoint_id=folder, process_group=group)
    except CheckpointException as error:
        if (cause := _os_error(error)) is not None:
            raise cause from error
        raise


def read_shards(tensors: Mapping[str, Tensor], folder: Path, group: Any = None) -> None:
    """Read tensors in place: whole, or what each process of a group has of them."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # which is intended
        load(dict(tensors), checkpoint_id=folder, process_group=group, no_dist=group is None)


def stored_names(folder: Path) -> set[str]:
    """Return the names of all tensors of a sharded checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def read_sharded_model(folder: Path, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Read the model of a sharded checkpoint, whole."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    read_shards({f"{WEIGHTS}{name}": each.detach() for name, each in model.named_parameters()}, folder)
    return model


def _os_error(error: Any) -> OSError | None:
    for cause, _ in error.failures.values():
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            return OSError(cause.errno, str(cause))
    return None
