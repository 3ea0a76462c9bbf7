"""Reads what a page shows of a run's folder: its checkpoints, and the ends of its logs."""

from pathlib import Path

from leyden.api.views import CheckpointView, RunFiles
from leyden.config import ConfigError
from leyden.decoding import decode_text
from leyden.runs.checkpoint_files import (
    STATE_FILE,
    checkpoint_folder,
    checkpoint_policies,
    checkpoint_steps,
    read_best_step,
)
from leyden.runs.run_folder import folder_size

_TAIL_BYTES = 1 << 16


def read_run_files(folder: Path) -> RunFiles:
    """Return the checkpoints and logs of a run's folder; those that are deleted meanwhile are left out."""
    found = [view for policy in checkpoint_policies(folder) for view in _checkpoints(folder, policy)]
    return RunFiles(str(folder), tuple(found), {path.name: _tail(path) for path in sorted(folder.glob("*.log"))})


def _checkpoints(run: Path, policy: str) -> list[CheckpointView]:
    folder, steps = checkpoint_folder(run, policy), checkpoint_steps(run, policy)
    try:
        best = read_best_step(folder / f"step-{steps[-1]}" / STATE_FILE) if steps else None
        return [
            CheckpointView(
                policy, step, (path / STATE_FILE).stat().st_mtime, folder_size(path), step == best, str(path)
            )
            for step in steps
            if (path := folder / f"step-{step}").is_dir()
        ]
    except (OSError, ConfigError):
        return []


def _tail(path: Path) -> str:
    """Return the end of a file, from the beginning of a line."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        data = file.read(_TAIL_BYTES)
    return decode_text(data if len(data) < _TAIL_BYTES else data.partition(b"\n")[2])
