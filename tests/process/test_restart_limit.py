"""A process that fails too often within a time is not started again; one that fails now and then is."""

from types import SimpleNamespace

import pytest

from leyden.process import restart_limit
from leyden.process.restart_limit import RestartLimit


def test_failures_count_only_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 50.0, 100.0, 140.0, 159.0])
    clock = SimpleNamespace(monotonic=lambda: next(times))  # other threads have the real one
    monkeypatch.setattr(restart_limit, "time", clock)
    limit = RestartLimit(3, within_s=60.0)
    assert [limit.add_failure() for _ in range(5)] == [False, False, False, False, True]


def test_a_caller_may_count_the_time_of_service_only() -> None:
    limit = RestartLimit(3, within_s=60.0)
    assert not limit.add_failure(0.0) and not limit.add_failure(1000.0)
    assert not limit.add_failure(1010.0) and limit.add_failure(1020.0)
