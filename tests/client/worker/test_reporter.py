"""What the server learns of an attempt's end, also where it refuses what comes with it."""

from worker_harness import WorkerHarness

from leyden.api.wire import LeaseRequest
from leyden.client.host_protocol import AttemptEnd
from leyden.client.services.registry import ServiceRegistry
from leyden.client.worker.reporter import Reporter
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Reward, RewardKind, State


async def test_a_free_retry_stays_free_where_a_step_reward_is_refused(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("g", {})
    (lease,) = await harness.remote.lease(LeaseRequest("w", run="r"))
    reward = Reward("step", 1.0, kind=RewardKind.STEP, call="no-such-call")
    end = AttemptEnd(lease.attempt.id, Outcome(Ending.LOST, "another attempt hung"), retry=Retry.FREE)
    await Reporter(harness.remote, None, ServiceRegistry({})).report(lease, end, [reward])  # type: ignore[arg-type]
    detail = await harness.remote.get_rollout("r", lease.attempt.rollout)
    assert detail.rollout.state is State.QUEUED
    assert detail.attempts[0].outcome == end.outcome


async def test_the_parts_of_a_reward_are_recorded_with_their_weights(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("g", {})
    (lease,) = await harness.remote.lease(LeaseRequest("w", run="r"))
    end = AttemptEnd(lease.attempt.id, Outcome(Ending.SUCCEEDED), reward={"correct": 1.0, "format": 0.5})
    reporter = Reporter(harness.remote, None, ServiceRegistry({}), weights={"format": 0.1})  # type: ignore[arg-type]
    await reporter.report(lease, end)
    episode = await harness.remote.get_episode("r", lease.attempt.id)
    assert episode.reward_parts == {"correct": 1.0, "format": 0.5}
    assert (await harness.remote.get_rollout("r", lease.attempt.rollout)).rollout.state is State.FINISHED
    assert episode.final_reward(0.0) == 1.05
