"""Groups are requested and read together, and each is yielded once, with its own episodes."""

import asyncio

import pytest

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.orchestrator.rollouts import collector
from leyden.outcomes import Ending, Outcome
from leyden.records import Reward, Task


async def finish(remote: Remote, run: str, count: int) -> None:
    """Finish so many rollouts, each with the number of its task as the reward."""
    for _ in range(count):
        (lease,) = await remote.lease(LeaseRequest("w", 1, 5.0, run))
        rewards = (Reward("final", float(lease.task.id)),)
        await remote.finish(run, lease.attempt.id, FinishRequest(Outcome(Ending.SUCCEEDED), None, rewards))


@pytest.mark.parametrize("at_once", [1, 3, 64])
async def test_each_group_is_yielded_once_with_its_own_episodes(
    remote: Remote, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_AT_ONCE", at_once)
    run = f"run-{at_once}"
    specs = [GroupSpec(f"{run}-{number}", Task(str(number), {}), 2) for number in range(8)]
    await remote.create_run(RunSpec(run))
    await remote.enqueue(run, specs[0])
    await finish(remote, run, 2)  # a group of an earlier start
    finishing = asyncio.create_task(finish(remote, run, 14))
    found = [one async for one in collector.RolloutCollector(remote, run).gather(specs)]
    await finishing
    assert sorted(spec.id for spec, _ in found) == [spec.id for spec in specs]
    for spec, episodes in found:
        assert [episode.final_reward(0.0) for episode in episodes] == [float(spec.task.id)] * 2


async def test_no_names_are_kept_of_groups_that_were_read(remote: Remote) -> None:
    specs = [GroupSpec(f"group-{number}", Task(str(number), {}), 1) for number in range(2)]
    await remote.create_run(RunSpec("names"))
    await remote.enqueue("names", specs[0])
    await finish(remote, "names", 1)  # its event is read after it was yielded
    finishing = asyncio.create_task(finish(remote, "names", 1))
    collecting = collector.RolloutCollector(remote, "names")
    assert [spec.id async for spec, _ in collecting.gather(specs)] == ["group-0", "group-1"]
    await finishing
    assert "group-" not in str(vars(collecting))


async def test_groups_that_are_gathered_at_the_same_time_are_all_found(remote: Remote) -> None:
    first, second, third = (GroupSpec(f"at-once-{number}", Task(str(number), {}), 1) for number in range(3))
    await remote.create_run(RunSpec("at-once"))
    await remote.enqueue("at-once", first)
    await finish(remote, "at-once", 1)
    collecting = collector.RolloutCollector(remote, "at-once")
    one, other = collecting.gather([first, second]), collecting.gather([third])
    assert (await anext(one))[0] == first
    await finish(remote, "at-once", 1)
    finishing = asyncio.create_task(finish(remote, "at-once", 1))
    assert (await anext(other))[0] == third  # the end of the second group was read too
    await finishing
    async with asyncio.timeout(10):
        assert (await anext(one))[0] == second


async def test_groups_of_an_earlier_process_are_found_though_one_of_them_is_missing(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "_AT_ONCE", 3)
    await remote.create_run(RunSpec("killed"))
    for position in (1, 2, 3, 5):  # the process was killed while it requested 4 and 5
        await remote.enqueue("killed", GroupSpec(f"train-{position}", Task(str(position), {}), 1))
    found = await collector.RolloutCollector(remote, "killed").find_from(2)
    assert {position: group.task for position, group in found.items()} == {2: "2", 3: "3", 5: "5"}
