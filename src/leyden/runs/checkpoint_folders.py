"""Finds the checkpoints of a policy in the folder of a run.

Those of a policy named `writer` are `policies/writer/step-N`; those of the default policy are `step-N`.
"""

import re
from pathlib import Path

from leyden.records import DEFAULT_POLICY

STATE_FILE = "state.json"
"""The file of a checkpoint without which a folder is none."""
_NAME = re.compile(r"step-(\d+)")
_POLICIES = "policies"


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
