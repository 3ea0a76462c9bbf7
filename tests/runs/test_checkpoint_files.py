"""What commands read of a checkpoint without its weights."""

from pathlib import Path

import msgspec
import pytest

from leyden.config import ConfigError
from leyden.learner.protocol import OpenGroup, TrainerState
from leyden.runs.checkpoint_files import (
    STATE_FILE,
    checkpoint_folder,
    checkpoint_steps,
    drop_unfinished_steps,
    read_last_closed_step,
    write_checksums,
)


@pytest.mark.parametrize(("open_groups", "last"), [((), 8), ((OpenGroup(30, 7, 9),), 8), ((OpenGroup(3, 1, 5),), 4)])
def test_rollouts_of_open_groups_are_needed(tmp_path: Path, open_groups: tuple[OpenGroup, ...], last: int) -> None:
    state = TrainerState(step=8, open_groups=open_groups)
    (tmp_path / STATE_FILE).write_bytes(msgspec.json.encode(state))
    assert read_last_closed_step(tmp_path / STATE_FILE) == last


def write_steps(run: Path, **steps: list[int]) -> None:
    for policy, each in steps.items():
        for step in each:
            folder = checkpoint_folder(run, policy) / f"step-{step}"
            folder.mkdir(parents=True)
            (folder / STATE_FILE).write_bytes(msgspec.json.encode(TrainerState(step=step)))
            write_checksums(folder)


def damage(run: Path, policy: str, step: int) -> None:
    (checkpoint_folder(run, policy) / f"step-{step}" / STATE_FILE).write_text("{}")


def test_steps_that_not_all_policies_have_saved_are_repeated(tmp_path: Path) -> None:
    write_steps(tmp_path, writer=[2, 4, 6], checker=[2, 4])
    drop_unfinished_steps(tmp_path, ["writer", "checker"], pytest.fail)
    assert [checkpoint_steps(tmp_path, policy) for policy in ("writer", "checker")] == [[2, 4], [2, 4]]
    write_steps(tmp_path / "first", writer=[2], checker=[])
    drop_unfinished_steps(tmp_path / "first", ["writer", "checker"], pytest.fail)
    assert checkpoint_steps(tmp_path / "first", "writer") == []


def test_all_policies_go_back_to_the_last_step_that_is_whole_and_say_so(tmp_path: Path) -> None:
    write_steps(tmp_path, writer=[2, 4], checker=[2, 4])
    damage(tmp_path, "checker", 4)
    said: list[str] = []
    drop_unfinished_steps(tmp_path, ["writer", "checker"], said.append)
    assert [checkpoint_steps(tmp_path, policy) for policy in ("writer", "checker")] == [[2], [2]]
    (message,) = said
    assert "policies/checker/step-4 (state.json has 2 bytes" in message and "goes on from step 2" in message


def test_a_run_whose_steps_are_all_damaged_does_not_begin_anew_unasked(tmp_path: Path) -> None:
    write_steps(tmp_path, writer=[2, 4], checker=[2, 4])
    damage(tmp_path, "checker", 4)
    damage(tmp_path, "writer", 2)
    with pytest.raises(ConfigError, match=r"checker/step-4 .*; .*writer/step-2 .*: start over with --restart"):
        drop_unfinished_steps(tmp_path, ["writer", "checker"], pytest.fail)
    assert [checkpoint_steps(tmp_path, policy) for policy in ("writer", "checker")] == [[2, 4], [2, 4]]
