"""The sampling phase is split in proportion to what the rollouts spent their seconds on."""

import pytest
from msgspec.structs import replace
from smallepisodes import episode

from leyden.api.wire import CallTimes
from leyden.episodes import Episode
from leyden.orchestrator.rollouts.time_split import split_sampling


def attempt(started: float, ended: float, created: float = 100.0, number: int = 1) -> Episode:
    found = episode(0, 1.0, [])
    return replace(
        found,
        rollout=replace(found.rollout, created=created),
        attempt=replace(found.attempt, started=started, ended=ended, number=number),
    )


def test_every_second_of_a_rollout_is_counted_once() -> None:
    rollouts = [attempt(101.0, 111.0), attempt(103.0, 113.0)]
    calls = CallTimes(total_s=15.0, queued_s=2.0, prompt_s=3.0, decoding_s=8.0, store_s=0.5)
    split = split_sampling(48.0, rollouts, calls, since=100.0)
    assert split == pytest.approx(
        # 1 + 3 s for a worker and 2 s for a slot; 20 s of attempts without 15 s of calls; 24 s in all
        {"waiting": 12.0, "agents": 10.0, "gateway": 3.0, "store": 1.0, "prompt": 6.0, "decoding": 16.0}
    )
    assert sum(split.values()) == pytest.approx(48.0)


def test_rollouts_of_an_earlier_process_and_the_wait_before_a_retry_do_not_count() -> None:
    split = split_sampling(
        4.0, [attempt(50.0, 90.0, created=40.0), attempt(120.0, 121.0, number=2)], CallTimes(), 100.0
    )
    assert split == {"waiting": 0.0, "agents": 4.0, "gateway": 0.0, "store": 0.0, "prompt": 0.0, "decoding": 0.0}


def test_where_nothing_ran_all_of_it_was_waiting() -> None:
    assert split_sampling(4.0, [], CallTimes(), 100.0) == {"waiting": 4.0}


def test_after_a_restart_of_the_server_its_times_count_from_zero() -> None:
    assert CallTimes(5.0, 1.0, 1.0, 2.0, 0.5).since(CallTimes(3.0, 1.0, 0.5, 1.0, 0.25)) == CallTimes(
        2.0, 0.0, 0.5, 1.0, 0.25
    )
    assert CallTimes(5.0).since(CallTimes(9.0)) == CallTimes(5.0)
