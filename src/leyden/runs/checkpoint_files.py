"""Finds the checkpoints of a policy in the folder of a run, and knows a damaged one before it is loaded.

Those of a policy named `writer` are `policies/writer/step-N`; those of the default policy are `step-N`.

This module does not import torch.
"""

import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from leyden.config import ConfigError
from leyden.records import DEFAULT_POLICY

STATE_FILE = "state.json"
"""The file of a checkpoint without which a folder is none."""
_NAME = re.compile(r"step-(\d+)")
_POLICIES = "policies"
_CHECKSUMS_FILE = "checksums.json"


def checkpoint_folder(run: Path, policy: str) -> Path:
    """Return the folder that has a policy's checkpoints."""
    return run if policy == DEFAULT_POLICY else run / _POLICIES / policy


def checkpoint_policies(run: Path) -> list[str]:
    """Return the policies that may have checkpoints in a run: the default policy, and each that has a folder."""
    folder = run / _POLICIES
    named = (path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    return [DEFAULT_POLICY, *sorted(named)]


def checkpoint_steps(run: Path, policy: str) -> list[int]:
    """Return the steps of which a policy has checkpoints."""
    folder = checkpoint_folder(run, policy)
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(
        int(name[1]) for path in entries if (name := _NAME.fullmatch(path.name)) and (path / STATE_FILE).exists()
    )


def latest_checkpoint(run: Path, policy: str) -> Path | None:
    """Return a policy's newest checkpoint."""
    steps = checkpoint_steps(run, policy)
    return checkpoint_folder(run, policy) / f"step-{steps[-1]}" if steps else None


def common_steps(run: Path, policies: Iterable[str]) -> list[int]:
    """Return the steps of which all of some policies have checkpoints.

    After a kill while they were saved one after the other, the newest of a policy may not be among them.
    """
    steps = [set(checkpoint_steps(run, policy)) for policy in policies]
    return sorted(set.intersection(*steps)) if steps else []


def drop_unfinished_steps(run: Path, policies: Sequence[str], warn: Callable[[str], None]) -> None:
    """Delete the checkpoints of several policies after the last step of which all have a whole one: it is repeated.

    `warn` is told of damaged ones. If no step is whole, nothing is deleted, and a `ConfigError` says so.
    """
    if len(policies) < 2:
        return
    folders = {policy: checkpoint_folder(run, policy) for policy in policies}
    common, last, damages = common_steps(run, policies), 0, list[str]()
    for step in reversed(common):
        found = [one / f"step-{step}" for one in folders.values()]
        damaged = [f"{folder} ({damage})" for folder in found if (damage := find_damage(folder)) is not None]
        if not damaged:
            last = step
            break
        damages += damaged
    if damages and not last:
        raise ConfigError(f"every step has a damaged checkpoint: {'; '.join(damages)}: start over with --restart")
    for damage in damages:
        warn(f"the checkpoint {damage} is damaged: the run goes on from step {last}")
    for policy, folder in folders.items():
        for step in checkpoint_steps(run, policy):
            if step > last:
                shutil.rmtree(folder / f"step-{step}")


class FileChecksum(Struct, frozen=True):
    """The size and the CRC-32 of a file."""

    bytes: int
    crc32: int


class _Step(Struct, frozen=True):
    step: int = 0


class _StepsOfState(Struct, frozen=True):
    step: int = 0
    open_groups: tuple[_Step, ...] = ()
    best_step: int | None = None
    kept_step: int | None = None
    pools: dict[str, tuple[_Step, ...]] = {}


def needed_steps(folder: Path, newest: Collection[int]) -> set[int]:
    """Return the steps whose checkpoints a run needs to resume from any of the `newest`, of which a folder has all.

    Beside these they are, for each, the best, one from before a collapse, and those that self-play meets.
    """
    needed = set(newest)
    for step in newest:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):  # it is damaged: no run resumes from it
            state = msgspec.json.decode((folder / f"step-{step}" / STATE_FILE).read_bytes(), type=_StepsOfState)
            pooled = (one.step for pool in state.pools.values() for one in pool)
            needed.update(one for one in (state.best_step, state.kept_step, *pooled) if one is not None)
    return needed


def read_last_closed_step(state_file: Path) -> int:
    """Return the last step up to which a run that resumes from a checkpoint needs no rollout of any group."""
    state = msgspec.json.decode(state_file.read_bytes(), type=_StepsOfState)
    return min([state.step, *(group.step - 1 for group in state.open_groups)])


def read_best_step(state_file: Path) -> int | None:
    """Return the step with the highest held-out reward; 0 is the model before training."""
    try:
        step = msgspec.json.decode(state_file.read_bytes(), type=dict[str, object]).get("best_step")
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{state_file.parent} is not a checkpoint: {error}") from error
    return step if isinstance(step, int) else None


def write_checksums(folder: Path) -> None:
    """Write the checksums of all files of a checkpoint."""
    found = {path.name: _checksum(path) for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / _CHECKSUMS_FILE).write_bytes(msgspec.json.encode(found))


def find_damage(folder: Path) -> str | None:
    """Return what is wrong with the files of a checkpoint; None if nothing is."""
    if not folder.is_dir():
        return "its folder is missing"
    try:
        written = msgspec.json.decode((folder / _CHECKSUMS_FILE).read_bytes(), type=dict[str, FileChecksum])
        for name, checksum in written.items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if (size := path.stat().st_size) != checksum.bytes:
                return f"{name} has {size} bytes instead of {checksum.bytes}"
            if _checksum(path) != checksum:
                return f"{name} is not what was written"
    except (OSError, msgspec.DecodeError) as error:
        return f"it cannot be read: {error}"
    return None


def _checksum(path: Path) -> FileChecksum:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return FileChecksum(size, crc)
