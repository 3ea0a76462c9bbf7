"""The learner in this process: an update is accumulated, made, saved and restored by the name of its policy."""

import asyncio
import errno
import shutil
import threading
from collections.abc import Awaitable, Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples

from leyden.config import AdapterConfig, CheckpointConfig
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.earlier import EarlierAdapter, EarlierModel
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.policy import Policy
from leyden.learner.protocol import PooledVersion, TrainerState, Update
from leyden.models.source import ModelSource
from leyden.runs.checkpoint_files import checkpoint_steps, write_checksums

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


async def test_an_earlier_version_has_the_weights_of_a_checkpoint_while_the_policy_goes_on(tmp_path: Path) -> None:
    policy = small_policy()
    model = deepcopy(policy.served)
    checkpoints = Checkpoints(tmp_path, "mine", SPARK, CheckpointConfig(keep=1))
    mine = TrainedPolicy(policy, OBJECTIVE, checkpoints)
    with LocalLearner({"mine": mine}, {"opponent": EarlierModel(model, checkpoints)}) as learner:
        saved = []
        for step in (1, 2, 3):
            await update(learner)
            pools = {"opponent": (PooledVersion(1),)}
            await learner.save("mine", TrainerState(step=step, policy="mine", version=10 * step, pools=pools))
            await learner.finish_save("mine")
            saved.append(weight(policy))
        assert checkpoint_steps(tmp_path, "mine") == [1, 3]  # one is kept, and one is in the pool
        for step in (1, 3):
            await learner.load("opponent", step)
            weights = learner.weights("opponent")
            assert dict(weights.tensors())["model.norm.weight"].tolist() == saved[step - 1]
            assert weights.adapter() is None and await learner.version_of("opponent", step) == 10 * step
        assert weight(policy) == saved[2]


async def test_an_earlier_version_of_an_adapter_is_that_of_a_checkpoint(tmp_path: Path) -> None:
    policy = small_policy(lora=AdapterConfig(rank=2, alpha=6))
    assert policy.adapter is not None
    checkpoints = Checkpoints(tmp_path, "mine", SPARK, CheckpointConfig(optimiser=False))
    earlier = EarlierAdapter(policy.adapter, checkpoints)
    mine = TrainedPolicy(policy, OBJECTIVE, checkpoints)
    with LocalLearner({"mine": mine}, {"opponent": earlier}) as learner:
        before = policy.adapter.weights()
        first = learner.weights("opponent").adapter()
        assert first is not None and before.rank == first.rank == 2
        assert {name: tensor.shape for name, tensor in first.tensors.items()} == {
            name: tensor.shape for name, tensor in before.tensors.items()
        }
        assert not any(tensor.any() for tensor in first.tensors.values())
        await update(learner)
        saved = {name: tensor.clone() for name, tensor in policy.adapter.weights().tensors.items()}
        await learner.save("mine", TrainerState(step=1, policy="mine", version=1))
        await learner.finish_save("mine")
        await update(learner)
        await learner.load("opponent", 1)
        found = learner.weights("opponent").adapter()
        assert found is not None and all(torch.equal(tensor, saved[name]) for name, tensor in found.tensors.items())


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
    return LocalLearner({"mine": TrainedPolicy(cast(Any, policy), cast(Any, None), cast(Any, checkpoints))})


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
