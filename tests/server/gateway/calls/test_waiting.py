"""Waiting times of calls."""

import time

from leyden.records import WaitInterval
from leyden.server.gateway.calls.waiting import WaitTimer, total_s


def test_overlapping_waits_count_once() -> None:
    waits = [WaitInterval(5, 6), WaitInterval(0, 2), WaitInterval(1, 3), WaitInterval(1.5, 1.6), WaitInterval(3, 4)]
    assert total_s(waits) == 5
    assert total_s([]) == 0


def test_a_wait_that_has_not_ended_lasts_until_now() -> None:
    timer = WaitTimer()
    assert timer.intervals() == ()
    timer.begin("scheduler")
    time.sleep(0.01)
    timer.begin("scheduler")
    assert total_s(timer.intervals()) >= 0.01
    timer.end("scheduler")
    timer.end("scheduler")
    (interval,) = timer.intervals()
    time.sleep(0.01)
    assert timer.intervals() == (interval,)


def test_a_wait_lasts_until_its_last_cause_has_ended() -> None:
    timer = WaitTimer()
    timer.begin("scheduler")
    timer.begin("engine")
    timer.end("scheduler")
    time.sleep(0.01)
    assert total_s(timer.intervals()) >= 0.01
    timer.end("engine")
    (interval,) = timer.intervals()
    time.sleep(0.01)
    assert timer.intervals() == (interval,)
