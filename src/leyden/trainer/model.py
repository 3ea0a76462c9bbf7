"""The model to train: found, checked, and loaded, or refused in one line before any work starts."""

import os
from importlib.resources import files
from pathlib import Path

import torch
import transformers
from msgspec import Struct
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from leyden.config import ConfigError
from leyden.server.gateway.tokenizer import Tokenizer, TokenizerError

BUNDLED = {"spark": files("leyden") / "models" / "spark"}
_BYTES_FOR_TRAINING = 16
"""Of a parameter in float32: the weight, its gradient, and two moments of the optimiser."""


class Source(Struct, frozen=True):
    """Where a model's files are, and what it is known by."""

    name: str
    folder: Path


def find(name: str, base: str) -> Source:
    """The folder of a model by its name: a bundled one, a folder (beneath `base` or here), or one of Hugging Face."""
    if name in BUNDLED:
        return Source(name, Path(str(BUNDLED[name])))
    for folder in (Path(base) / name, Path(name)):
        if (folder / "config.json").is_file():
            return Source(name, folder.absolute())
        if folder.is_dir():
            raise ConfigError(f"`model`: {folder} has no config.json: name the folder of a Hugging Face model")
    try:
        from huggingface_hub import snapshot_download

        return Source(
            name, Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
        )
    except Exception as error:  # of many kinds: no such name, no network, no access
        reason = str(error).splitlines()[0][:160]
        raise ConfigError(
            f"`model`: {name!r} is neither bundled ({', '.join(BUNDLED)}) nor a folder, "
            f"and cannot be had from Hugging Face: {reason}"
        ) from error


def load_tokenizer(source: Source) -> Tokenizer:
    """Its tokenizer, which must come with a chat template."""
    try:
        tokenizer = Tokenizer.load(source.folder, source.name)
    except TokenizerError as error:
        raise ConfigError(f"`model`: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"`model`: {source.name} has no chat template, so it cannot be talked to: "
            "take its instruct version, or add chat_template to its tokenizer_config.json"
        )
    return tokenizer


def device() -> torch.device:
    """Where models are computed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_model(source: Source, dtype: str, training: bool) -> PreTrainedModel:
    """The model in memory, on a GPU where there is one."""
    where = device()
    if training:
        _enough_memory(source, where)
    transformers.utils.logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"`model`: {source.name} cannot be loaded: {str(error).splitlines()[0]}") from error
    model.eval()  # no dropout: what is trained must be what was sampled
    return model.to(where)  # type: ignore[no-any-return, arg-type]


def _enough_memory(source: Source, where: torch.device) -> None:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.folder))
    needed = empty.num_parameters() * _BYTES_FOR_TRAINING
    free = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else _free_memory()
    if needed > free:
        raise ConfigError(
            f"`model`: to train {source.name} ({empty.num_parameters() / 1e6:.0f} million parameters) takes about "
            f"{needed / 2**30:.2g} GiB and {free / 2**30:.2g} are free: take a smaller model or a larger machine"
        )


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
