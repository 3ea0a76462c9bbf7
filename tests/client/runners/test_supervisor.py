"""Code that hangs or crashes in a shared process harms no other attempt, and only its own attempt is blamed."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from modelserving import eventually
from worker_harness import AGENTS, WorkerHarness, alive, ending, in_sections, message

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest, Lease, LeaseRequest
from leyden.client.attempt.active_attempt import ActiveAttempt
from leyden.client.host_protocol import CodeReturned, StopReply
from leyden.client.runners.supervisor import RunnerSupervisor
from leyden.client.worker.options import WorkerOptions
from leyden.client.worker.worker import work
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Attempt, Purpose, State, Task
from leyden.server.control.keys import KeyKind


def active_attempt() -> ActiveAttempt:
    attempt = Attempt("g.0.1", "r", "g.0", 1, "w", None, 0.0, 60.0)
    return ActiveAttempt(Lease(attempt, Task("t", {}), Purpose.TRAIN, 60.0, "", "", ""))


async def processes_in(file: Path) -> list[psutil.Process]:
    await eventually(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [psutil.Process(int(pid)) for pid in file.read_text().split()]  # noqa: ASYNC240


# tests/client/test_chaos.py has agents that burn
@pytest.mark.parametrize("how", ["block", pytest.param("burn", marks=pytest.mark.slow)])
async def test_code_that_hangs_times_out_and_its_process_ends_while_another_attempt_continues(
    harness: WorkerHarness, tmp_path: Path, how: str
) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("hangs", {"do": how, "file": str(tmp_path / "family")})
    with harness.worker("hanging.py:act", time_limit_s=8.0, drain_s=10.0, concurrency=2):
        family = await processes_in(tmp_path / "family")
        await asyncio.sleep(5.0)  # so that the one is out of time while the other has some left
        await harness.queue("beside", {"do": "wait", "for": str(tmp_path / "go")})
        hangs = await harness.episode("hangs")
        (tmp_path / "go").touch()
        beside = await harness.episode("beside")
        await harness.queue("next", {"do": "sleep", "s": 0.1})
        following = await harness.episode("next")
        assert all(map(alive, family))  # for as long as others could have wanted to finish
        await eventually(lambda: not any(map(alive, family)))
    assert ending(hangs) is Ending.TIMEOUT
    assert hangs.attempt.ended and 7.9 < hangs.attempt.ended - hangs.attempt.started < 17  # before it is drained
    assert ending(following) is Ending.SUCCEEDED
    assert (ending(beside), beside.attempt.number) == (Ending.SUCCEEDED, 1), message(beside)


async def test_attempts_lost_with_a_process_that_hangs_are_retried_at_once_and_for_free(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("hangs", {"do": "block", "file": str(tmp_path / "family")})
    with harness.worker("hanging.py:act", time_limit_s=5.0, drain_s=0.0):
        await processes_in(tmp_path / "family")
        await asyncio.sleep(2.0)
        await harness.queue("beside", {"do": "wait", "for": str(tmp_path / "go")})
        await harness.event("attempt.ended", "beside.0.1")
        (tmp_path / "go").touch()
        beside = await harness.episode("beside")
    assert (ending(beside), beside.attempt.number) == (Ending.SUCCEEDED, 2)
    (lost, retried) = (await harness.remote.get_rollout("r", "beside.0")).attempts
    assert lost.outcome and lost.outcome.ending is Ending.LOST and "another attempt in it hung" in lost.outcome.message
    assert retried.started - (lost.ended or 0) < 15  # before its lease would have expired


async def test_code_that_lets_no_thread_run_is_attributed_to_its_attempt(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("hangs", {"do": "hold the lock"})
    await harness.queue("beside", {"do": "sleep", "s": 0.5}, size=2)
    with harness.worker("hanging.py:act", time_limit_s=4.0, drain_s=0.0):
        beside, hangs = await harness.episodes("beside"), await harness.episode("hangs")
    assert (ending(hangs), hangs.attempt.number) == (Ending.TIMEOUT, 2)
    assert [ending(one) for one in beside] == [Ending.SUCCEEDED] * 2
    assert hangs.output == "about to hold the lock\n"


async def test_no_process_of_a_killed_worker_is_left_where_no_thread_can_run(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open()
    await harness.queue("hangs", {"do": "hold the lock", "file": str(tmp_path / "family")})
    with harness.worker("hanging.py:act") as worker:
        family = await processes_in(tmp_path / "family")
        worker.process.kill()
        await eventually(lambda: not any(map(alive, family)))


async def test_an_attempt_that_another_keeps_from_running_has_not_timed_out(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("innocent", {"do": "sleep", "s": 2.0})
    await harness.queue("blocks", {"do": "block", "first_s": 0.5})
    # a time-out is excused if the loop was blocked for half of the limit: the rest is for a slow start
    with harness.worker("hanging.py:act_async", time_limit_s=12.0, drain_s=2.0):
        innocent, blocks = await harness.episode("innocent"), await harness.episode("blocks")
    assert ending(blocks) is Ending.TIMEOUT and blocks.attempt.number == 1
    assert ending(innocent) is Ending.SUCCEEDED and innocent.attempt.number == 2
    (lost, _) = (await harness.remote.get_rollout("r", "innocent.0")).attempts
    assert lost.outcome and lost.outcome.ending is Ending.LOST
    assert lost.outcome.message.startswith("attempt blocks.0.1 blocked the event loop")


class TracedRunner:
    """A runner whose only attempt returns at once, and whose spans the server has when the test says so."""

    stop_timeout_s = 60.0

    def __init__(self) -> None:
        self.flushing, self.flushed, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.ends: asyncio.Queue[CodeReturned] = asyncio.Queue()

    def start_attempt(self, lease: Lease) -> None:
        self.ends.put_nowait(CodeReturned(lease.id, FinishRequest(Outcome(Ending.SUCCEEDED)), has_spans=True))

    async def listen(self, on_event: Callable[[CodeReturned], None]) -> None:
        while True:
            on_event(await self.ends.get())

    async def flush_spans(self, attempt: str) -> None:
        self.flushing.set()
        await self.flushed.wait()

    async def close(self, *, kill: bool = False) -> None:
        self.closed.set()


def limits(time_limit_s: float, drain_s: float, unresponsive_s: float) -> WorkerOptions:
    sections = in_sections(time_limit_s=time_limit_s, drain_s=drain_s)
    return WorkerOptions(server="", agent="", unresponsive_s=unresponsive_s, **sections)


async def never(lease: Lease, ran_s: float) -> float:
    raise AssertionError("no attempt reaches its time limit")


async def test_an_attempt_has_returned_before_its_spans_are_exported_and_its_runner_stays_until_they_are() -> None:
    runner, active = TracedRunner(), active_attempt()
    supervisor = RunnerSupervisor(runner, limits(60.0, 0.0, 60.0), never)
    supervising = asyncio.create_task(supervisor.run())
    running = asyncio.create_task(supervisor.run_attempt(active))
    async with asyncio.timeout(20):
        await runner.flushing.wait()
        assert active.released.is_set()
        supervisor.retired.set()
        _, waiting = await asyncio.wait((supervising, running), timeout=0.1)
        assert len(waiting) == 2 and not runner.closed.is_set()
        runner.flushed.set()
        end = await running
        await supervising
    assert end and end.outcome.ending is Ending.SUCCEEDED and runner.closed.is_set()


class BlockedRunner:
    """A runner whose event loop is blocked by another attempt when an attempt is stopped."""

    stop_timeout_s = 60.0

    def __init__(self, blocked_s: float) -> None:
        self.blocked_s = blocked_s

    def start_attempt(self, lease: Lease) -> None:
        pass

    async def stop(self, attempt: str) -> StopReply:
        return StopReply(attempt, "printed", "other.0.1", self.blocked_s)


@pytest.mark.parametrize(
    ("blocked_s", "ends", "retry"), [(0.02, Ending.TIMEOUT, Retry.CHARGED), (0.1, Ending.LOST, Retry.ALONE)]
)
async def test_a_timeout_is_excused_once_and_only_where_the_loop_was_blocked_for_most_of_the_time(
    blocked_s: float, ends: Ending, retry: Retry
) -> None:
    async def time_out(lease: Lease, ran_s: float) -> float:
        return 0.0

    supervisor = RunnerSupervisor(BlockedRunner(blocked_s), limits(0.1, 1.0, 1.0), time_out)
    end = await supervisor.run_attempt(active_attempt())
    assert end and (end.outcome.ending, end.retry, end.output) == (ends, retry, "printed")
    assert supervisor.retired.is_set() is (ends is Ending.LOST)


async def test_a_blocked_event_loop_is_noticed_and_its_blocker_retried_alone(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("innocent", {"do": "sleep", "s": 1.0})
    await harness.queue("blocks", {"do": "block", "first_s": 0.3})
    with harness.worker("hanging.py:act_async", time_limit_s=6, unresponsive_s=1.0, drain_s=0.5):
        innocent, blocks = await harness.episode("innocent"), await harness.episode("blocks")
    assert (ending(innocent), innocent.attempt.number) == (Ending.SUCCEEDED, 2)
    assert (ending(blocks), blocks.attempt.number) == (Ending.TIMEOUT, 2)
    (lost, alone) = (await harness.remote.get_rollout("r", "blocks.0")).attempts
    assert lost.outcome and lost.outcome.message == "it blocked the event loop of its process, which was ended"
    assert alone.started - (lost.ended or 0) > 0.4  # not at once


@pytest.mark.parametrize(
    ("how", "says"),
    [
        # tests/client/test_chaos.py has these two
        pytest.param("exit", "exit status 9", marks=pytest.mark.slow),
        pytest.param("die", "killed by SIGKILL", marks=pytest.mark.slow),
        ("segfault", "killed by SIGSEGV"),
        ("real-time", f"killed by signal {signal.SIGRTMIN + 6}"),
    ],
)
async def test_an_attempt_that_kills_its_process_is_blamed_and_no_other_is(
    harness: WorkerHarness, how: str, says: str
) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("innocent", {"do": "sleep", "s": 1.0}, size=3)
    await harness.queue("guilty", {"do": how})
    with harness.worker("hanging.py:act"):
        innocent, guilty = await harness.episodes("innocent"), await harness.episode("guilty")
    assert ending(guilty) is Ending.AGENT_ERROR and guilty.attempt.number == 2
    assert message(guilty).startswith(f"the agent's process died for the second time: {says}\n")
    assert message(guilty).endswith(f"about to {how}") and guilty.output.endswith(f"about to {how}\n")
    if how == "segfault":
        assert "Fatal Python error: Segmentation fault\nCurrent thread" in message(guilty)
        assert 'hanging.py", line' in message(guilty) and "in fall\n" in message(guilty)
    assert [ending(one) for one in innocent] == [Ending.SUCCEEDED] * 3
    (lost, *_) = (await harness.remote.get_rollout("r", "guilty.0")).attempts
    assert lost.outcome and lost.outcome.ending is Ending.LOST and says in lost.outcome.message


@pytest.mark.parametrize("export_s", [0.0, 3.0])
async def test_spans_that_are_open_at_the_time_limit_are_recorded_as_failed(
    harness: WorkerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export_s: float
) -> None:
    store = harness.server.service.store
    record = store.record_spans

    async def record_slowly(*spans: Any) -> Any:
        await asyncio.sleep(export_s)  # 3 s is longer than a host may take to reply
        return await record(*spans)

    monkeypatch.setattr(store, "record_spans", record_slowly)
    await harness.open(max_attempts=1)
    await harness.queue("g", {"do": "think"})
    with harness.worker("hanging.py:act", time_limit_s=8):
        await harness.event("attempt.started", "g.0.1")
        await harness.queue("beside", {"do": "wait", "for": str(tmp_path / "never")})
        episode = await harness.episode("g")
    assert (ending(episode), episode.attempt.number) == (Ending.TIMEOUT, 1), message(episode)
    assert episode.output == "about to think\n"
    assert [(span.name, span.status) for span in episode.spans] == [("thinking", "error")]
    assert [episode.role(call) for call in episode.calls] == ["thinker"]


async def test_a_lease_that_comes_while_the_worker_stops_is_given_back(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.open(max_attempts=1)
    stop, lease = asyncio.Event(), Remote.lease

    async def lease_late(remote: Any, request: LeaseRequest) -> list[Lease]:
        leases: list[Lease] = await remote.call(lease, request)
        stop.set()
        await asyncio.sleep(0.5)
        return leases

    monkeypatch.setattr(Remote, "lease", lease_late)
    options = WorkerOptions(server=harness.server.url, run="r", agent="hanging.py:act", base=str(AGENTS), grace_s=0.0)
    await harness.queue("g", {"do": "sleep", "s": 0})
    await work(options, harness.server.service.keyring.create(KeyKind.WORKER, 600, run="r")[0], stop)
    detail = await harness.remote.get_rollout("r", "g.0")
    assert detail.rollout.state is State.QUEUED
    (attempt,) = detail.attempts
    assert attempt.outcome and "gave it back" in attempt.outcome.message
