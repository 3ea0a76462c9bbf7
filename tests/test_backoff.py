"""Waits between tries grow, are bounded and differ from each other."""

from functools import partial

import pytest

from leyden.backoff import Backoff


def test_waits_double_up_to_the_maximum() -> None:
    backoff = Backoff(first_s=0.5, max_s=60.0)
    assert [backoff.limit_s(failures) for failures in (1, 2, 3, 7, 8, 10_000)] == [0.5, 1.0, 2.0, 32.0, 60.0, 60.0]


def test_a_wait_has_jitter_of_up_to_half_of_it() -> None:
    backoff = Backoff(first_s=1.0, max_s=4.0)
    waits = [backoff.delay_s(3) for _ in range(200)]
    assert all(2.0 <= wait <= 4.0 for wait in waits)
    assert len(set(waits)) > 100


async def test_work_is_tried_as_often_as_said_and_only_after_the_errors_that_are_named() -> None:
    tried: list[type[Exception]] = []

    async def fail(error: type[Exception]) -> None:
        tried.append(error)
        raise error

    for error in (KeyError, ValueError):
        with pytest.raises(error):
            await Backoff(0.001, 0.001).retry(partial(fail, error), 3, KeyError)
    assert tried == [KeyError] * 3 + [ValueError]
