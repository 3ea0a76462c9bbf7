"""Waits between tries grow, are bounded and differ from each other."""

from leyden.backoff import Backoff


def test_waits_double_up_to_the_maximum() -> None:
    backoff = Backoff(first_s=0.5, max_s=60.0)
    assert [backoff.limit_s(failures) for failures in (1, 2, 3, 7, 8, 10_000)] == [0.5, 1.0, 2.0, 32.0, 60.0, 60.0]


def test_a_wait_has_jitter_of_up_to_half_of_it() -> None:
    backoff = Backoff(first_s=1.0, max_s=4.0)
    waits = [backoff.delay_s(3) for _ in range(200)]
    assert all(2.0 <= wait <= 4.0 for wait in waits)
    assert len(set(waits)) > 100
