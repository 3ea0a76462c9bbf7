"""Agents that are classes: made once a place, used by one attempt at a time, replaced when ill, closed at the end."""

import asyncio
import threading
from functools import partial
from pathlib import Path

import pytest
from modelserving import eventually
from worker_harness import WorkerHarness

from leyden.api.wire import Lease
from leyden.client.host.python_agent import CallableAgent, ClassAgent
from leyden.outcomes import Ending
from leyden.records import Attempt, Purpose, Task
from leyden.user_code.loading import LoadError

ATTEMPT = Lease(
    *(Attempt("a.0.1", "r", "a.0", 1, "w", None, 0.0, 60.0), Task("t", 1), Purpose.TRAIN, 60.0),
    *("key", "http://127.0.0.1:1", f"00-{'1' * 32}-{'2' * 16}-01"),
)


async def test_an_instance_is_kept_between_rollouts_and_closed_at_the_end(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open()
    log = tmp_path / "log"
    with harness.worker("keeping.py:Kept", concurrency=1, grace_s=5.0) as worker:
        seen = []
        for n, task in enumerate(
            ({}, {}, {"do": "raise", "ill": False}, {}, {"do": "raise", "ill": True}, {"do": "x"}, {})
        ):
            await harness.queue(f"g{n}", {"log": str(log), **task})
            episode = await harness.episode(f"g{n}")
            seen.append(tuple(episode.attempt.result.values()) if episode.attempt.result else None)
        assert seen == [(1, 1), (1, 2), None, (1, 4), None, (2, 1), (2, 2)]
        assert log.read_text() == "closed 1\n"
        worker.stop()
        assert await asyncio.to_thread(worker.process.wait, 60) == 0
        await eventually(lambda: log.read_text() == "closed 1\nclosed 2\n")


async def test_concurrent_attempts_have_different_instances(harness: WorkerHarness, tmp_path: Path) -> None:
    await harness.open()
    for n in range(12):
        await harness.queue(f"g{n}", {"log": str(tmp_path / "log"), "s": 0.05})
    with harness.worker("keeping.py:Kept", concurrency=3):
        found = [await harness.episode(f"g{n}") for n in range(12)]
    assert {episode.attempt.outcome.ending for episode in found if episode.attempt.outcome} == {Ending.SUCCEEDED}
    assert {episode.attempt.result["instance"] for episode in found} <= {1, 2, 3}
    assert max(episode.attempt.result["calls"] for episode in found) > 1


async def test_an_async_class_is_closed_on_the_loop_that_it_ran_on(harness: WorkerHarness, tmp_path: Path) -> None:
    await harness.open()
    log = tmp_path / "log"
    with harness.worker("keeping.py:KeptAsync", concurrency=1, grace_s=5.0) as worker:
        for n in range(2):
            await harness.queue(f"g{n}", {"log": str(log)})
            assert (await harness.episode(f"g{n}")).attempt.result == n + 1
        await worker.end()  # not in peace: its host sees to it all the same
        await eventually(lambda: log.exists() and log.read_text() == "closed True")


async def test_a_set_up_that_fails_is_not_held_against_the_model(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=2)
    await harness.queue("g", {})
    with harness.worker("keeping.py:Unmakeable"):
        episode = await harness.episode("g")
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.LOST and episode.attempt.number == 2
    assert "could not be set up: OSError: no emulator here" in episode.attempt.outcome.message


@pytest.mark.parametrize(
    ("name", "says"),
    [("Wants", "is created without arguments: give port defaults"), ("Mute", "give it a method __call__(self, task)")],
)
async def test_a_class_that_cannot_be_an_agent_is_one_line(
    harness: WorkerHarness, name: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    await harness.open()
    with harness.worker(f"keeping.py:{name}") as worker:
        assert await asyncio.to_thread(worker.process.wait, 60) == 2
    said = capfd.readouterr().err
    assert says in said and said.count("\n") == 1


def test_an_instance_of_length_0_is_kept_too() -> None:
    made: list[object] = []

    class Memory:
        def __init__(self) -> None:
            made.append(self)

        def __len__(self) -> int:
            return 0

        def __call__(self, task: object) -> object:
            return self

    solve = ClassAgent(Memory, "agent.py:Memory", 1).function()
    assert [solve({}, attempt=ATTEMPT) for _ in range(3)] == 3 * made[:1]


async def test_an_instance_whose_attempt_is_stopped_while_it_is_made_is_kept() -> None:
    made: list[object] = []
    making, may_end = threading.Event(), threading.Event()

    class Slow:
        def __init__(self) -> None:
            making.set()
            assert may_end.wait(20)
            made.append(self)

        async def __call__(self, task: object) -> object:
            return self

    agent = ClassAgent(Slow, "agent.py:Slow", 1)
    solve = agent.function()
    stopped = asyncio.create_task(solve({}, attempt=ATTEMPT))
    await asyncio.to_thread(making.wait)
    stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped
    may_end.set()
    await eventually(lambda: len(agent._idle) == 1)
    assert await solve({}, attempt=ATTEMPT) is made[0]
    assert len(made) == 1


def test_an_agent_takes_the_task_and_the_attempt_by_name() -> None:
    assert CallableAgent(lambda task: task, "f").bind(1, ATTEMPT)() == 1
    assert CallableAgent(lambda question, attempt: (question, attempt.id), "f").bind(1, ATTEMPT)() == (1, "a.0.1")
    assert CallableAgent(lambda task, *, attempt=None, tries=3: (attempt.key, tries), "f").bind(1, ATTEMPT)() == (
        "key",
        3,
    )
    assert CallableAgent(lambda *tasks: tasks, "f").bind(1, ATTEMPT)() == (1,)
    for wrong, says in (
        (lambda: 1, "has no parameter for the task"),
        (lambda attempt: 1, "has no parameter for the task"),
        (lambda task, database: 1, "takes task, database"),
        (lambda task, *, database: 1, "takes task, database"),
    ):
        with pytest.raises(LoadError, match=says):
            CallableAgent(wrong, "f")


async def test_async_agents_are_known_as_such() -> None:
    async def agent(task: int) -> int:
        return task

    class Callable:
        async def __call__(self, task: int) -> int:
            return task

    assert (
        CallableAgent(agent, "f").is_async
        and CallableAgent(Callable(), "f").is_async
        and CallableAgent(partial(agent), "f").is_async
    )
    assert not CallableAgent(lambda task: agent(task), "f").is_async  # a thread makes the coroutine, the loop awaits it
