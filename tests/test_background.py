"""Background tasks: one that fails logs its traceback at once, and no loop waits in a way that loses a cancellation."""

import ast
import asyncio
from pathlib import Path

import pytest

from leyden.background import running, start_background, wait_set


async def fail() -> None:
    raise RuntimeError("the disk is full")


async def test_a_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    task = start_background(fail(), "the sweeper")
    await asyncio.wait((task,))
    await asyncio.sleep(0)
    assert "the sweeper failed" in caplog.text
    assert "in fail" in caplog.text and "RuntimeError: the disk is full" in caplog.text


async def test_success_and_cancellation_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [start_background(asyncio.sleep(0), "short"), start_background(asyncio.sleep(60), "long")]
    await tasks[0]
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert not caplog.text


async def test_what_runs_within_a_context_has_ended_after_it(caplog: pytest.LogCaptureFixture) -> None:
    ended = []

    async def work(seconds: float, result: str) -> str:
        try:
            await asyncio.sleep(seconds)
            return result
        finally:
            ended.append(result)

    with pytest.raises(RuntimeError, match="enough"):
        async with running(work(0, "short"), work(60, "long")) as (short, long):
            assert await short == "short" and not long.done()
            raise RuntimeError("enough")
    assert long.cancelled() and ended == ["short", "long"]


def test_no_loop_uses_wait_for() -> None:
    """`asyncio.wait_for` of Python 3.11 swallows a cancellation that arrives when the awaited event does."""
    found = []
    for path in (Path(__file__).parents[1] / "src").rglob("*.py"):
        for loop in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(loop, ast.While | ast.For | ast.AsyncFor):
                names = (ast.unparse(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call))
                found += [f"{path}:{loop.lineno}" for name in names if name == "asyncio.wait_for"]
    assert not found, "use asyncio.timeout instead"


async def test_waiting_for_an_event_ends_with_the_event_or_the_time() -> None:
    event = asyncio.Event()
    assert not await wait_set(event, 0.01)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_set(event, None)
