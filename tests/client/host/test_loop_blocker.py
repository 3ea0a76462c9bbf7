"""A host knows for how long its event loop was blocked, also while it is."""

import asyncio
import threading
import time

import pytest

from leyden.client.host import loop_blocker
from leyden.client.host.loop_blocker import WatchedLoop


async def test_the_time_in_which_a_loop_was_blocked_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_blocker, "_TIMEOUT_S", 0.0)  # so that a busy machine counts as what it is: a blocked loop
    watched, measured = WatchedLoop(asyncio.get_running_loop()), threading.Event()
    meanwhile: list[float] = []

    def measure() -> None:
        meanwhile.append(watched.blocked_s())
        measured.set()

    began, before_s = time.monotonic(), watched.blocked_s()
    time.sleep(1.0)  # noqa: ASYNC251 - it blocks the event loop, and that is the point
    threading.Thread(target=measure).start()
    measured.wait(20)
    blocked_s = time.monotonic() - began
    await asyncio.sleep(0)  # the loop runs again
    after_s = watched.blocked_s()
    assert 0.7 < meanwhile[0] - before_s < blocked_s
    assert meanwhile[0] <= after_s


async def test_moments_in_which_a_loop_does_not_run_are_not_counted() -> None:
    watched = WatchedLoop(asyncio.get_running_loop())
    watched._measured = (0.0, time.monotonic() - 0.1)  # a tick that is a little late
    assert watched.blocked_s() == 0.0
