"""`leyden prune`: frees what a run no longer needs. It keeps what the run needs to resume: calls, rewards, metrics."""

import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from leyden.config import ConfigError
from leyden.runs.checkpoint_files import (
    STATE_FILE,
    checkpoint_folder,
    checkpoint_policies,
    checkpoint_steps,
    common_steps,
    needed_steps,
    read_last_closed_step,
)
from leyden.runs.run_folder import RunFolder, folder_size
from leyden.runs.run_names import STORE_NAME, own_run
from leyden.store.read import queries
from leyden.store.store import Store

Prunable = Literal["checkpoints", "output", "spans"]
PRUNABLE: tuple[Prunable, ...] = ("checkpoints", "output", "spans")
_LEFT_OVER = re.compile(r"\.step-\d+\.draft|step-\d+\.damaged")


async def prune_run(path: Path, what: Collection[Prunable] = PRUNABLE, keep: int = 1) -> int:
    """Free parts of a run that no process uses; returns the freed bytes.

    Checkpoints of the newest `keep` steps that all policies have stay, of later ones, and those that a run needs which
    resumes from one of these: the best, and those that self-play meets. Output and spans of rollouts after the newest
    checkpoint stay, and those of its open groups, because a run that resumes trains on these rollouts.
    """
    if keep < 1:
        raise ConfigError("a run resumes from its newest checkpoint: keep at least 1, or delete it (`leyden delete`)")
    with RunFolder(path).lock():
        before = folder_size(path)
        steps = {policy: found for policy in checkpoint_policies(path) if (found := checkpoint_steps(path, policy))}
        common = common_steps(path, steps)
        if "checkpoints" in what:
            for policy, found in steps.items():
                _prune_checkpoints(checkpoint_folder(path, policy), found, common[-keep:])
        if common and {"output", "spans"} & {*what} and (path / STORE_NAME).exists():
            store = await Store(path / STORE_NAME).start()
            newest = checkpoint_folder(path, next(iter(steps))) / f"step-{common[-1]}"
            last = read_last_closed_step(newest / STATE_FILE)
            try:
                run = own_run(path, await store.read(queries.list_run_ids))
                if run is not None:
                    await store.prune(run, last, output="output" in what, spans="spans" in what)
            finally:
                await store.close()
        return before - folder_size(path)


def _prune_checkpoints(path: Path, steps: Sequence[int], newest: Sequence[int]) -> None:
    """Delete what is older than the `newest` steps, unless it is kept for another reason; all stay if there is none."""
    needed = needed_steps(path, newest)
    old = [path / f"step-{step}" for step in steps if newest and step < newest[0] and step not in needed]
    for folder in (*old, *(folder for folder in path.iterdir() if _LEFT_OVER.fullmatch(folder.name))):
        shutil.rmtree(folder)
