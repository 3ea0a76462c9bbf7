"""Checkpoints are written while training goes on, one at a time; a run ends when the last one is written."""

import asyncio
from pathlib import Path

import pytest
from scripted_training import ScriptedRun

from leyden.backoff import Backoff
from leyden.learner.protocol import TrainerState


async def wait_for(run: ScriptedRun, entry: str) -> None:
    """Wait until something has happened."""
    happened = asyncio.Event()
    run.journal.on_write = lambda: happened.set() if run.journal[-1] == entry else None
    await happened.wait()


def started(run: ScriptedRun) -> asyncio.Task[TrainerState]:
    run.learner.disk_works.clear()
    return asyncio.create_task(run.start())


@pytest.mark.parametrize("limit", [0, 2])
async def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits(
    tmp_path: Path, limit: int
) -> None:
    run = ScriptedRun(tmp_path, training={"steps": 5, "max_staleness": limit}, checkpoints={"every": 2})
    training = started(run)
    await wait_for(run, "report 4")
    for _ in range(100):
        await asyncio.sleep(0)
    assert "copy 2" in run.journal and "copy 4" not in run.journal and not run.checkpoints
    run.learner.disk_works.set()
    await training
    entries = [entry for entry in run.journal if entry.split()[0] in ("copy", "save")]
    assert entries == ["copy 2", "save 2", "copy 4", "save 4", "copy 5", "save 5"]
    undisturbed = ScriptedRun(tmp_path / "again", training={"steps": 2, "max_staleness": limit})
    await undisturbed.start()
    assert run.checkpoints[2][1] == undisturbed.learner.digest  # the weights that were copied


@pytest.mark.parametrize("test", [0, 1], ids=["end", "test of the best"])
async def test_a_run_ends_and_loads_a_checkpoint_only_when_it_is_written(tmp_path: Path, test: int) -> None:
    run = ScriptedRun(tmp_path, held_out=1, test=test, training={"steps": 1})
    training = started(run)
    await wait_for(run, "copy 1")
    for _ in range(100):
        await asyncio.sleep(0)
    assert run.journal[-1] == "copy 1" and not training.done()
    run.learner.disk_works.set()
    await training
    assert 1 in run.checkpoints


async def test_a_full_disk_does_not_stop_training_until_the_next_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.orchestrator.disk_room._BACKOFF", Backoff(0.0, 0.0))
    run = ScriptedRun(tmp_path, training={"steps": 3}, checkpoints={"every": 1})
    run.learner.full_disks = 10**9
    training = asyncio.create_task(run.start())
    await wait_for(run, "report 2")
    assert not run.checkpoints and len(run.observer.warnings) == 1
    run.learner.full_disks = 0
    await training
    assert sorted(run.checkpoints) == [1, 2, 3]


async def test_a_checkpoint_that_cannot_be_written_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, training={"steps": 9}, checkpoints={"every": 5})

    async def refused(policy: str) -> None:
        raise PermissionError(13, "Permission denied")

    run.learner.finish_save = refused
    with pytest.raises(PermissionError):
        await run.start()
    assert "report 5" in run.journal and "report 6" not in run.journal
