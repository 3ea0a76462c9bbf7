"""A child answers requests, and is killed where it does not answer."""

import asyncio
import gc
import signal
from pathlib import Path

import pytest

from leyden.process import answering
from leyden.process.answering import AnsweringProcess

ANSWERING = """
import os, sys, time
from leyden.process.answering import answer_requests

def answer(request):
    if request == b"end":
        os._exit(0)
    if request == b"sleep":
        time.sleep(600)
    return request.upper()

answer_requests(int(sys.argv[1]), answer)
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "answering_in_capitals.py").write_text(ANSWERING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "answering_in_capitals"


async def test_requests_are_answered_until_one_ends_the_process(module: str) -> None:
    process = AnsweringProcess(module, b"sets it up")
    for request in (b"a", b"long" * 100_000):
        assert await process.ask(request, 60.0) == request.upper()
    assert await process.ask(b"end", 60.0) is None
    assert await process.ask(b"a", 60.0) is None
    assert process.status == 0


async def test_a_process_that_takes_too_long_is_killed(module: str) -> None:
    process = AnsweringProcess(module)
    assert await process.ask(b"sleep", 0.05) is None
    assert process.status == -signal.SIGKILL


async def test_a_process_whose_set_up_takes_too_long_is_killed(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "_SETUP_TIMEOUT_S", 0.05)
    process = AnsweringProcess(module, b"sleep")
    async with asyncio.timeout(30):
        assert await process.ask(b"a", 60.0) is None
    assert process.status == -signal.SIGKILL


async def test_a_process_that_nobody_waits_for_is_killed(module: str) -> None:
    process = AnsweringProcess(module)
    asking = asyncio.create_task(process.ask(b"sleep", 600.0))
    await asyncio.sleep(0.1)
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled() and process.status == -signal.SIGKILL


async def test_a_process_that_is_no_longer_referenced_is_killed(module: str) -> None:
    process = AnsweringProcess(module)
    assert await process.ask(b"a", 60.0) == b"A"
    child = process.process
    del process
    gc.collect()
    assert await asyncio.to_thread(child.wait, 60) == -signal.SIGKILL
