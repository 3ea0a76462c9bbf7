"""What the server learns of an attempt's end, also where it refuses what comes with it."""

from worker_harness import WorkerHarness

from leyden.api.wire import FinishRequest, LeaseRequest
from leyden.client.attempt.outcome import end_of_attempt
from leyden.client.attempt.result import Result
from leyden.client.host_protocol import HostSetup
from leyden.client.isolation.options import IsolationOptions
from leyden.client.services.registry import ServiceRegistry
from leyden.client.worker.reporter import Reporter
from leyden.config.schema import RolloutConfig
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Reward, RewardKind, State


async def test_a_free_retry_stays_free_where_a_step_reward_is_refused(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("g", {})
    (lease,) = await harness.remote.lease(LeaseRequest("w", run="r"))
    reward = Reward("step", 1.0, kind=RewardKind.STEP, call="no-such-call")
    end = FinishRequest(Outcome(Ending.LOST, "another attempt hung"), retry=Retry.FREE)
    await Reporter(harness.remote, None, ServiceRegistry({})).report(lease, end, [reward])
    detail = await harness.remote.get_rollout("r", lease.attempt.rollout)
    assert detail.rollout.state is State.QUEUED
    assert detail.attempts[0].outcome == end.outcome


async def test_the_parts_of_a_reward_are_recorded_with_their_weights(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("g", {})
    (lease,) = await harness.remote.lease(LeaseRequest("w", run="r"))
    weighted = IsolationOptions(rollout=RolloutConfig(reward_weights={"format": 0.1}))
    setup = HostSetup("agent.py:act", ".", (), "", "", 1, has_reward_function=False, isolation=weighted)
    end = end_of_attempt(Result(2, {"correct": 1.0, "format": 0.5}), setup)
    await Reporter(harness.remote, None, ServiceRegistry({})).report(lease, end)
    episode = await harness.remote.get_episode("r", lease.attempt.id)
    assert episode.reward_parts == {"correct": 1.0, "format": 0.5}
    assert (await harness.remote.get_rollout("r", lease.attempt.rollout)).rollout.state is State.FINISHED
    assert episode.final_reward(0.0) == 1.05
