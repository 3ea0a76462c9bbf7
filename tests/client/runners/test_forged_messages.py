"""Code in a host can say only what an agent may say, whatever it writes to the channel."""

from worker_harness import WorkerHarness

from leyden.outcomes import Ending
from leyden.records import RewardKind


async def test_a_host_cannot_set_final_rewards_or_end_what_it_does_not_run(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=2)
    for name in ("final", "stranger"):
        await harness.queue(name, {"do": name})
    with harness.worker("forging.py:forge", reward="forging.py:quarter", concurrency=1):
        final, stranger = await harness.episode("final"), await harness.episode("stranger")
    for episode in (final, stranger):
        assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.SUCCEEDED
        assert episode.final_reward(-1.0) == 0.25
    assert sorted((r.value, r.kind, r.source) for r in final.rewards) == [
        (0.25, RewardKind.FINAL, "reward"),
        (0.5, RewardKind.STEP, "agent"),
    ]
    assert [r.value for r in stranger.rewards] == [0.25]


async def test_a_retry_that_a_host_calls_free_is_charged(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=2)
    await harness.queue("g", {"do": "free"})
    with harness.worker("forging.py:forge", reward="forging.py:quarter", concurrency=1):
        episode = await harness.episode("g")
    assert episode.attempt.number == 2


async def test_a_host_that_sends_no_message_is_killed_and_the_worker_goes_on(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=2)
    for name in ("huge", "noise", "well"):
        await harness.queue(name, {"do": name})
    with harness.worker("forging.py:forge", reward="forging.py:quarter", concurrency=1):
        well = await harness.episode("well")
        bad = [await harness.episode(name) for name in ("huge", "noise")]
    assert well.final_reward(-1.0) == 0.25
    for episode in bad:  # the process ended with them or before: never a success of unknown origin
        assert episode.attempt.outcome is not None
