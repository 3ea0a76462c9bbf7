"""`leyden prune`: frees what a run no longer needs. It keeps what the run needs to resume: calls, rewards, metrics."""

import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from leyden.config import ConfigError
from leyden.local.run_folder import RunFolder, folder_size
from leyden.store.store import Store
from leyden.trainer.checkpoint_files import STATE_FILE, checkpoint_steps, read_best_steps

Prunable = Literal["checkpoints", "output", "spans"]
PRUNABLE: tuple[Prunable, ...] = ("checkpoints", "output", "spans")
_LEFT_OVER = re.compile(r"\.step-\d+\.draft|step-\d+\.damaged")


async def prune_run(path: Path, what: Collection[Prunable] = PRUNABLE, keep: int = 1) -> int:
    """Free parts of a run that no process uses; returns the freed bytes.

    Of the checkpoints the newest `keep` and the best stay. Output and spans of rollouts after the newest checkpoint
    stay, because a run that resumes trains on these rollouts again.
    """
    if not (path / "config.toml").is_file():
        raise ConfigError(f"{path} is not the folder of a run: name a run that `leyden runs` lists")
    with RunFolder(path).lock():
        before = folder_size(path)
        steps = checkpoint_steps(path)
        if "checkpoints" in what and steps:
            _prune_checkpoints(path, steps, keep)
        if steps and {"output", "spans"} & {*what} and (path / "leyden.db").exists():
            store = await Store(path / "leyden.db").start()
            try:
                await store.prune(path.name, steps[-1], output="output" in what, spans="spans" in what)
            finally:
                await store.close()
        return before - folder_size(path)


def _prune_checkpoints(path: Path, steps: list[int], keep: int) -> None:
    kept = {*steps[-keep:], *read_best_steps(path / f"step-{steps[-1]}" / STATE_FILE)}
    old = [path / f"step-{step}" for step in steps if step not in kept]
    for folder in (*old, *(folder for folder in path.iterdir() if _LEFT_OVER.fullmatch(folder.name))):
        shutil.rmtree(folder)
