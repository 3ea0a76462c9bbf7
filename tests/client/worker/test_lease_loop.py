"""Sync agents that share objects between event loops run one at a time, and are not blamed before."""

import pytest
from worker_harness import WorkerHarness

from leyden.client.worker.lease_loop import LOOP_ERRORS
from leyden.outcomes import Ending


async def test_agents_that_share_objects_between_event_loops_run_again_one_at_a_time(
    harness: WorkerHarness, capfd: pytest.CaptureFixture[str]
) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("first", {}, size=16)
    with harness.worker("syncing.py:share", processes=2, concurrency=16):
        first = await harness.episodes("first")
        await harness.queue("later", {}, size=8)
        later = await harness.episodes("later")
    outcomes = [episode.attempt.outcome for episode in (*first, *later)]
    assert {outcome and outcome.ending for outcome in outcomes} == {Ending.SUCCEEDED}, outcomes
    retried = next(episode for episode in first if episode.attempt.number > 1)
    (lost, *_) = (await harness.remote.get_rollout("r", retried.rollout.id)).attempts
    assert lost.outcome and lost.outcome.ending is Ending.LOST
    assert "is bound to a different event loop" in lost.outcome.message
    assert [episode.final_reward(0.0) for episode in (retried, *later)] == [1.0] * 9  # so many ran in its process
    assert capfd.readouterr().err.count(LOOP_ERRORS) == 1


async def test_an_agent_that_fails_alone_with_an_event_loop_is_blamed(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("fails", {})
    with harness.worker("syncing.py:fail", concurrency=1):
        episode = await harness.episode("fails")
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.AGENT_ERROR
    assert episode.attempt.outcome.message.startswith("RuntimeError: Event loop is closed")
    assert episode.attempt.number == 2


async def test_every_rollout_of_a_sync_agent_of_the_openai_agents_sdk_succeeds(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)
    with harness.worker("syncing.py:ask", concurrency=16):
        for name in ("first", "second"):  # the second find connections that other event loops have left
            await harness.queue(name, {"n": 7}, size=16)
            episodes = await harness.episodes(name)
            assert [episode.final_reward(0.0) for episode in episodes] == [7.0] * 16
