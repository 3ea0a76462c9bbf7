"""The task of two steps in `table/`, in its own folder: what to train on it, and how a run on it went."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

from table.make_tasks import make

from leyden.config import override, read_config, read_file
from leyden.local.train import TrainingResult, train
from leyden.orchestrator.report.metrics_log import read_metrics

TABLE = Path(__file__).parent / "table"
LOTS = """
from zlib import crc32

def reward(episode):
    return crc32(episode.attempt.id.encode()) % 997 / 997
"""


def train_table(folder: Path, *settings: str) -> TrainingResult:
    """A run in a folder, or what is left of one that began there; `lots.py:reward` leaves no group flat."""
    shutil.copytree(TABLE, folder, dirs_exist_ok=True)
    (folder / "lots.py").write_text(LOTS)
    make(folder)
    given = override(read_file(folder / "table.toml"), [f"home={folder / 'runs'}", *settings])
    return asyncio.run(train(read_config(given)))


def steps(trained: TrainingResult) -> list[dict[str, Any]]:
    """What was written down of each step."""
    return [row for row in read_metrics(trained.folder / "metrics.jsonl", trained.policy) if row["step"] > 0]
