"""Reward functions are slow, remote and fallible: each gets its tries, and what fails to the last says why."""

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from modelserving import eventually
from serving import ServerProcess
from worker_harness import AGENTS, WorkerHarness

from leyden.api.client import Remote
from leyden.api.wire import EventCursor, GroupSpec, RunSpec
from leyden.backoff import Backoff
from leyden.client.rewards import function as reward_function
from leyden.client.rewards.function import NoReward, RewardFunction
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.process import WorkerProcess
from leyden.config.schema import RolloutConfig
from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome
from leyden.records import Attempt, Purpose, Rollout, RunSettings, State, Task
from leyden.server.control.keys import KeyKind
from leyden.user_code.loading import LoadError


def function(call: Callable[..., Any], tries: int = 3, limit_s: float = 5.0) -> RewardFunction:
    return RewardFunction(call, "f", RolloutConfig(reward_time_limit_s=limit_s, reward_tries=tries))


async def no_episode() -> Episode:
    raise AssertionError("nobody asked for it")


def episode(name: str) -> Episode:
    rollout = Rollout(name, "r", "g", "t", 0, Purpose.TRAIN, State.FINISHED, 1, 1, 0.0)
    return Episode(rollout, Attempt(f"{name}.1", "r", name, 1, "w", None, 0.0, 0.0), Task("t", {}))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_function, "_BACKOFF", Backoff(0.001, 0.001))


async def test_a_reward_function_that_fails_is_called_again() -> None:
    calls: list[int] = []

    def fallible(result: int) -> Any:
        calls.append(result)
        if len(calls) == 1:
            raise ConnectionError("the grader is away")
        return "rubbish" if len(calls) == 2 else result

    async def fallible_async(task: Any, result: int) -> Any:
        return fallible(result)

    for call in (fallible, fallible_async):
        calls.clear()
        assert await function(call).score({}, 7, no_episode) == 7.0
        assert len(calls) == 3
        calls.clear()
        with pytest.raises(NoReward, match="gave 'rubbish' as reward"):
            await function(call, tries=2).score({}, 7, no_episode)


async def test_a_reward_may_have_parts() -> None:
    parts = {"correct": 1, "format": 0.5}
    assert await function(lambda: parts).score({}, 7, no_episode) == parts
    group = [episode("g.0"), episode("g.1")]
    assert await function(lambda group: [parts, 1]).score_group({}, group) == {"g.0": parts, "g.1": 1.0}


async def test_a_reward_function_that_raises_a_cancellation_has_failed() -> None:
    async def cancels_a_task(result: int) -> float:
        grading = asyncio.create_task(asyncio.sleep(60))
        grading.cancel()
        await grading
        return 1.0

    async def cancels_itself(result: int) -> float:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return 1.0

    def raises(result: int) -> float:
        raise asyncio.CancelledError

    for call in (cancels_a_task, cancels_itself, raises):
        with pytest.raises(NoReward, match="it raised CancelledError"):
            await function(call, tries=2).score({}, 7, no_episode)


async def test_scoring_can_be_cancelled() -> None:
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def waits(result: int) -> float:
        loop.call_soon_threadsafe(started.set)
        await asyncio.sleep(60)
        return 1.0

    scoring = asyncio.create_task(function(waits).score({}, 7, no_episode))
    await started.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring


async def test_a_reward_that_dawdles_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(NoReward, match=r"did not return within 0\.1 s"):
        await function(lambda: time.sleep(30), tries=2, limit_s=0.1).score({}, 1, no_episode)
    with pytest.raises(NoReward, match="failed: TimeoutError"):
        await function(_own_time_out, tries=1).score({}, 1, no_episode)
    assert time.monotonic() - began < 20


async def _own_time_out() -> None:
    raise TimeoutError


async def test_a_function_that_exits_has_failed_and_the_next_call_is_none_the_worse() -> None:
    async def leave(result: int) -> float:
        return sys.exit(result) if result else 1.0

    for call in (leave, lambda result: sys.exit(result) if result else 1.0):
        with pytest.raises(NoReward, match="failed: SystemExit: 3"):
            await function(call, tries=1).score({}, 3, no_episode)
        assert await function(call).score({}, 0, no_episode) == 1.0


async def test_none_means_no_reward_and_is_not_retried() -> None:
    calls: list[int] = []
    with pytest.raises(NoReward, match="returned None"):
        await function(lambda: calls.append(1)).score({}, 1, no_episode)
    assert len(calls) == 1


async def test_a_group_gets_a_number_each_in_order_or_by_name() -> None:
    group = [episode("g.0"), episode("g.1"), episode("g.2")]
    for answer in ([1, None, True], (1, None, True), {"g.2": 1.0, "g.0": 1}):
        scored = await function(lambda group: answer).score_group({}, group)  # noqa: B023 - called here
        assert scored == {"g.0": 1.0, "g.1": None, "g.2": 1.0}
    for answer, says in (([1, 2], "2 rewards for a group of 3"), ({"x": 1}, "'x'"), (0.5, "one number for each")):
        with pytest.raises(NoReward, match=says):
            await function(lambda group: answer, tries=1).score_group({}, group)  # noqa: B023 - called here
    seen: list[Any] = []
    await function(lambda task, group: seen.append((task, group)) or [1, 1, 1]).score_group({"q": 1}, group)
    assert seen == [({"q": 1}, group)]


def test_what_cannot_be_given_is_refused() -> None:
    for wrong in (lambda group, result: 1, lambda other: 1, lambda task, db: 1):
        with pytest.raises(LoadError, match="it may take any of task, result, episode"):
            function(wrong)
    asks = RewardFunction(lambda task, db, cache=None: 1, "f", RolloutConfig(), ("db", "browser"))
    assert (asks.services, asks.takes_group) == (("db",), False)


async def test_a_rollout_makes_room_for_the_next_while_its_reward_is_computed(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open(lease_s=2.0)
    door = tmp_path / "door"
    for name in ("a", "b"):
        await harness.queue(name, {"door": str(door)})
    with harness.worker("grading.py:act", reward="grading.py:wait_for_door", concurrency=1):
        await harness.event("attempt.started", "b.0.1")  # though the only place is a's, which is not scored yet
        await asyncio.sleep(3.0)  # longer than a lease: heartbeats go on
        door.touch()
        for name in ("a", "b"):
            found = await harness.episode(name)
            assert (found.attempt.number, found.final_reward(0.0)) == (1, 1.0)


async def test_a_function_that_blocks_its_event_loop_does_not_cost_the_worker_its_leases(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open(lease_s=2.0)
    await harness.queue("g", {"door": str(tmp_path / "door")})
    with harness.worker("grading.py:act", reward="grading.py:block"):
        await eventually((tmp_path / "door.asked").exists)
        await asyncio.sleep(3.0)
        (tmp_path / "door").touch()
        found = await harness.episode("g")
    assert (found.attempt.number, found.final_reward(0.0)) == (1, 1.0)


async def test_a_group_is_scored_together_when_its_last_rollout_has_ended(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("g", {"do": "rank"}, size=4)
    with harness.worker("grading.py:act", reward="grading.py:rank", concurrency=3, processes=2):
        found = await harness.episodes("g")
        assert sorted(episode.final_reward(-1.0) or 0.0 for episode in found) == [0.0, 1.0, 2.0, 3.0]
        by_length = sorted(found, key=lambda episode: episode.attempt.result)
        assert [episode.final_reward(-1.0) for episode in by_length] == [0.0, 1.0, 2.0, 3.0]
        assert {reward.source for episode in found for reward in episode.rewards} == {"reward"}
        await harness.queue("some", {"do": "fail some"}, size=4)
        some = await harness.episodes("some")
        endings = [str(episode.attempt.outcome.ending) for episode in some if episode.attempt.outcome]
        assert endings == ["agent_error", "succeeded", "agent_error", "succeeded"]
        assert sorted(filter(None, (episode.final_reward(0.0) for episode in some))) == [1.0]
        await harness.queue("ill", {"do": "ill"}, size=2)
        for episode in await harness.episodes("ill"):
            outcome = episode.attempt.outcome
            assert outcome and outcome.ending is Ending.NO_REWARD and "the judge is ill" in outcome.message
            assert episode.attempt.result is not None


async def test_a_worker_that_dies_while_it_scores_leaves_the_group_to_another(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open(lease_s=1.0)
    door = tmp_path / "door"
    await harness.queue("g", {"do": "wait", "door": str(door)}, size=2)

    def worker() -> Any:
        return harness.worker("grading.py:act", reward="grading.py:rank_slowly", reward_tries=1)

    with worker() as first:
        await scoring_started(harness, 1)
        first.process.kill()
        with worker() as second:
            await scoring_started(harness, 2)
            second.stop()  # it gives back what it has
            await asyncio.to_thread(second.process.wait, 60)
            with worker():
                await scoring_started(harness, 3)
                door.touch()
                found = await harness.episodes("g")
    assert [episode.attempt.outcome for episode in found] == [Outcome(Ending.SUCCEEDED)] * 2
    assert [episode.attempt.number for episode in found] == [1, 1]
    assert [episode.final_reward(-1.0) for episode in found] == [0.0, 1.0]


async def scoring_started(harness: WorkerHarness, number: int) -> None:
    after, found = 0, 0
    async with asyncio.timeout(120):
        while found < number:
            log = await harness.remote.follow_events("r", EventCursor(after, wait=20, kind="scoring.started"))
            after, found = log.after, log.events[-1].data["number"]


async def test_a_function_that_never_returns_does_not_keep_a_worker_from_ending(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open()
    await harness.queue("g", {"door": str(tmp_path / "never")})
    with harness.worker("grading.py:act", reward="grading.py:wait_for_door") as worker:
        await eventually((tmp_path / "never.asked").exists)
        worker.stop()
        assert await asyncio.to_thread(worker.process.wait, 60) == 0
    assert (await harness.remote.get_rollout("r", "g.0")).rollout.state is State.QUEUED


async def test_a_group_outlives_a_server_that_is_killed_while_it_is_scored(tmp_path: Path) -> None:
    door = tmp_path / "door"
    with ServerProcess(tmp_path / "home") as server:
        async with Remote(server.url, server.admin_key) as remote:
            await remote.create_run(RunSpec("r", RunSettings(lease_s=2.0)))
            await remote.enqueue("r", GroupSpec("g", Task("t", {"do": "wait", "door": str(door)}), size=2))
            options = WorkerOptions(
                server=server.url, run="r", agent="grading.py:act", reward="grading.py:rank_slowly", base=str(AGENTS)
            )
            worker = WorkerProcess(options, server.key(KeyKind.WORKER, run="r"))
            assert (await remote.follow_events("r", EventCursor(wait=30, kind="scoring.started"))).events
            server.kill()
            door.touch()
            await asyncio.sleep(0.5)  # the function returns, and nobody is there to hear of it
            await asyncio.to_thread(server.start)
            assert (await remote.follow_events("r", EventCursor(wait=30, kind="group.finished"))).events
            found = await remote.group_episodes("r", "g")
            await worker.end()
    assert [(episode.attempt.number, episode.final_reward(-1.0)) for episode in found] == [(1, 0.0), (1, 1.0)]
