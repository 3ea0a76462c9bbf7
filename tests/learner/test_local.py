"""The learner in this process: an update is accumulated, made, saved and restored by the name of its policy."""

import asyncio
import errno
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples

from leyden.config import CheckpointConfig
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.policy import Policy
from leyden.learner.protocol import TrainerState, Update
from leyden.models.source import ModelSource
from leyden.runs.checkpoint_files import write_checksums

SPARK = ModelSource("spark", Path(__file__).parents[2] / "src/leyden/models/spark")


def learner_of(policy: Policy, folder: Path) -> LocalLearner:
    checkpoints = Checkpoints(folder, "mine", SPARK, CheckpointConfig())
    return LocalLearner({"mine": TrainedPolicy(policy, OBJECTIVE, checkpoints)})


async def test_a_policy_learns_and_is_restored_by_its_name(tmp_path: Path) -> None:
    policy, samples = small_policy(), some_samples()
    with learner_of(policy, tmp_path) as learner:
        assert await learner.restore("mine") == TrainerState(policy="mine")
        assert await learner.start_step("mine", 1) == policy.learning_rate
        before = await learner.logprobs("mine", samples)
        assert await learner.divergence("mine", samples, [one.tolist() for one in before]) == 0.0
        assert (await learner.accumulate("mine", Update(samples))).grad_norm > 0
        assert (await learner.logprobs("mine", samples))[0].tolist() == before[0].tolist()  # nothing is written yet
        await learner.apply("mine")
        after = await learner.logprobs("mine", samples)
        assert after[0].tolist() != before[0].tolist()
        state = TrainerState(step=1, policy="mine", version=1)
        await learner.save("mine", state)
        await learner.finish_save("mine")
        published = dict(learner.weights("mine").tensors())
        assert torch.equal(published["model.norm.weight"], policy.model.state_dict()["model.norm.weight"])
    with learner_of(small_policy(seed=9), tmp_path) as again:
        assert await again.restore("mine") == state
        assert [one.tolist() for one in await again.logprobs("mine", samples)] == [one.tolist() for one in after]
        assert await again.version_of("mine", 1) == 1


async def update(learner: LocalLearner) -> None:
    await learner.accumulate("mine", Update(some_samples()))
    await learner.apply("mine")


def weight(policy: Policy) -> list[float]:
    return policy.model.get_parameter("model.norm.weight").tolist()


async def restored(folder: Path) -> tuple[int, list[float]]:
    """The step and a weight of the newest checkpoint."""
    policy = small_policy(seed=9)
    with learner_of(policy, folder) as learner:
        return (await learner.restore("mine")).step, weight(policy)


async def test_a_policy_is_trained_while_a_slow_disk_writes_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, writing, may_end = small_policy(), threading.Event(), threading.Event()
    with learner_of(policy, tmp_path) as learner:
        await learner.save("mine", TrainerState(step=1, policy="mine"))
        await learner.finish_save("mine")
        before = weight(policy)
        await update(learner)
        copied = weight(policy)

        def slow(folder: Path) -> None:
            writing.set()
            may_end.wait(60)
            write_checksums(folder)

        monkeypatch.setattr("leyden.learner.checkpoint.write_checksums", slow)
        await learner.save("mine", TrainerState(step=2, policy="mine"))
        saving = asyncio.create_task(learner.finish_save("mine"))
        await asyncio.to_thread(writing.wait, 60)
        await update(learner)
        assert weight(policy) != copied and not saving.done()
        killed = Path(shutil.copytree(tmp_path, tmp_path / "killed"))
        assert await restored(killed) == (1, before)
        assert [path.name for path in (killed / "policies" / "mine").iterdir()] == ["step-1"]
        saving.cancel()  # the run ends otherwise
        may_end.set()
    assert await restored(tmp_path) == (2, copied)


async def test_a_copy_outlives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    policy = small_policy()
    with learner_of(policy, tmp_path) as learner:
        copied = weight(policy)
        await learner.save("mine", TrainerState(step=1, policy="mine"))
        monkeypatch.setattr("leyden.learner.checkpoint.save_file", full)
        with pytest.raises(OSError, match="No space"):
            await learner.finish_save("mine")
        await update(learner)
        monkeypatch.undo()
        await learner.finish_save("mine")
    assert await restored(tmp_path) == (1, copied) and weight(policy) != copied


async def test_without_memory_for_a_copy_a_checkpoint_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = small_policy()
    monkeypatch.setattr("leyden.learner.snapshot.free_memory", lambda: 1000)
    with learner_of(policy, tmp_path) as learner:
        await learner.save("mine", TrainerState(step=1, policy="mine"))
        assert await restored(tmp_path) == (1, weight(policy))
        await learner.finish_save("mine")


def scripted(policy: object = None, checkpoints: object = None) -> LocalLearner:
    return LocalLearner({"mine": cast(Any, SimpleNamespace(policy=policy, objective=None, checkpoints=checkpoints))})


@pytest.mark.parametrize("change", [lambda learner: learner.apply("mine"), lambda learner: learner.load("mine", 1)])
async def test_a_cancelled_change_of_the_weights_ends_when_they_are_written(
    change: Callable[[LocalLearner], Awaitable[None]],
) -> None:
    started, may_end, events = threading.Event(), threading.Event(), list[str]()

    def write(*_: object) -> None:
        started.set()
        may_end.wait(20)
        events.append("written")

    with scripted(SimpleNamespace(apply=write), SimpleNamespace(load=write)) as learner:
        learner._grad_norms["mine"] = 1.0

        async def make_change() -> None:
            try:
                await change(learner)
            finally:
                events.append("left")

        changing = asyncio.create_task(make_change())
        await asyncio.to_thread(started.wait, 20)
        for _ in range(2):
            changing.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not events
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await changing
    assert events == ["written", "left"]


async def test_objects_are_excluded_from_garbage_collections_after_the_first_optimiser_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = list[str]()
    monkeypatch.setattr("leyden.learner.local._freeze_objects", lambda: events.append("freeze"))
    policy = SimpleNamespace(apply=lambda _: events.append("apply"), learning_rate=0.1)
    with scripted(policy) as learner:
        for step in (1, 2):
            events.append("sample")
            await learner.start_step("mine", step)
            learner._grad_norms["mine"] = 1.0
            await learner.apply("mine")
    assert events == ["sample", "apply", "freeze", "sample", "apply"]
