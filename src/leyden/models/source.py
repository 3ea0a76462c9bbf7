"""Finds the files of a model by its name, without importing torch."""

import difflib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from msgspec import Struct

from leyden.config import ConfigError

BUNDLED = {"spark": files("leyden") / "models" / "spark"}


class ModelSource(Struct, frozen=True):
    """A model's name and the folder of its files."""

    name: str
    folder: Path


def find_local_model(name: str, base: str) -> ModelSource | None:
    """Find a bundled model or a folder (relative to `base` or the current one); None if only a download is left.

    A name that can only be a path is refused if there is no such folder.
    """
    if name in BUNDLED:
        return ModelSource(name, Path(str(BUNDLED[name])))
    for folder in (Path(base) / name, Path(name)):
        if (folder / "config.json").is_file():
            return ModelSource(name, folder.absolute())
        if folder.is_dir():
            raise ConfigError(f"`model`: {folder} has no config.json: name the folder of a Hugging Face model")
    folder = Path(base) / name
    if name.startswith(("/", ".")) or name.count("/") > 1 or folder.name.startswith("step-"):
        siblings = sorted(path.name for path in folder.parent.glob("step-*"))
        there = f"; there are {', '.join(siblings)}" if siblings else ""
        raise ConfigError(f"`model`: there is no folder {folder}{there}")
    return None


def find_model(name: str, base: str, runs: Sequence[str] | None = None) -> ModelSource:
    """Find a model by name: a bundled one, a folder, or on Hugging Face, from where it is downloaded.

    `runs` are names that may have been meant, too, if any are possible here.
    """
    if (found := find_local_model(name, base)) is not None:
        return found
    try:
        from huggingface_hub import snapshot_download

        return ModelSource(
            name, Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
        )
    except Exception as error:  # of many kinds: no such name, no network, no access
        reason = str(error).splitlines()[0].removeprefix("Got: ")[:160]
        near = difflib.get_close_matches(name, [*BUNDLED, *(runs or ())], 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        of_runs = "" if runs is None else " nor a run" if runs else " nor a run (there is none: see --home)"
        raise ConfigError(
            f"`model`: {name!r} is neither bundled ({', '.join(BUNDLED)}) nor a folder{of_runs}, "
            f"and cannot be downloaded from Hugging Face{hint}: {reason}"
        ) from error
