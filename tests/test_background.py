"""A background task that fails logs its traceback at once; one that is cancelled or succeeds logs nothing."""

import asyncio

import pytest

from leyden.background import start_background


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
