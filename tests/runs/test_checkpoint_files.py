"""What commands read of a checkpoint without its weights."""

from pathlib import Path

import msgspec
import pytest

from leyden.learner.protocol import OpenGroup, TrainerState
from leyden.runs.checkpoint_files import STATE_FILE, read_last_closed_step


@pytest.mark.parametrize(("open_groups", "last"), [((), 8), ((OpenGroup(30, 7, 9),), 8), ((OpenGroup(3, 1, 5),), 4)])
def test_rollouts_of_open_groups_are_needed(tmp_path: Path, open_groups: tuple[OpenGroup, ...], last: int) -> None:
    state = TrainerState(step=8, open_groups=open_groups)
    (tmp_path / STATE_FILE).write_bytes(msgspec.json.encode(state))
    assert read_last_closed_step(tmp_path / STATE_FILE) == last
