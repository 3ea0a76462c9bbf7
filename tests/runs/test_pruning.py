"""Pruning leaves every checkpoint that a run needs to resume."""

from pathlib import Path

import msgspec

from leyden.learner.protocol import PooledVersion, TrainerState
from leyden.runs.checkpoint_files import STATE_FILE, checkpoint_folder, checkpoint_steps
from leyden.runs.pruning import prune_run


def saved(run: Path, policy: str, *steps: int, **state: object) -> None:
    for step in steps:
        folder = checkpoint_folder(run, policy) / f"step-{step}"
        folder.mkdir(parents=True)
        found = TrainerState(step=step, policy=policy, **state)
        (folder / STATE_FILE).write_bytes(msgspec.json.encode(found))


async def test_the_best_and_those_that_self_play_meets_stay(tmp_path: Path) -> None:
    pool = tuple(map(PooledVersion, (0, 2, 6)))
    saved(tmp_path, "player", *range(1, 9), best_step=3, pools={"opponent": pool})
    await prune_run(tmp_path)
    assert checkpoint_steps(tmp_path, "player") == [2, 3, 6, 8]


async def test_what_each_of_the_newest_needs_stays(tmp_path: Path) -> None:
    saved(tmp_path, "player", *range(1, 8), best_step=1, pools={"opponent": (PooledVersion(2),)})
    saved(tmp_path, "player", 8, best_step=8, pools={"opponent": (PooledVersion(4),)})
    await prune_run(tmp_path, keep=2)
    assert checkpoint_steps(tmp_path, "player") == [1, 2, 4, 7, 8]


async def test_a_step_that_all_policies_have_stays_though_one_was_saved_after_it(tmp_path: Path) -> None:
    """A run that was killed between the checkpoints of its policies resumes from the step before."""
    saved(tmp_path, "writer", 1, 2, 3)
    saved(tmp_path, "checker", 1, 2)
    await prune_run(tmp_path)
    assert (checkpoint_steps(tmp_path, "writer"), checkpoint_steps(tmp_path, "checker")) == ([2, 3], [2])


async def test_without_a_step_that_all_have_all_stay(tmp_path: Path) -> None:
    saved(tmp_path, "writer", 1, 2)
    saved(tmp_path, "checker", 3)
    await prune_run(tmp_path)
    assert (checkpoint_steps(tmp_path, "writer"), checkpoint_steps(tmp_path, "checker")) == ([1, 2], [3])
