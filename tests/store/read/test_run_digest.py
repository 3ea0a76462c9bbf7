"""Counts and rewards of a run, on every database."""

from leyden.api.wire import FinishRequest, GroupSpec, Lease, LeaseRequest, Scores
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Call, Purpose, Reward, Task
from leyden.store.read.run_digest import StepTotal, digest_run
from leyden.store.store import Store

SUCCEEDED = Outcome(Ending.SUCCEEDED)


async def lease(store: Store, count: int = 1) -> list[Lease]:
    return await store.lease(LeaseRequest("w", count, run="r"))


async def test_rollouts_count_by_state_purpose_and_step(store: Store) -> None:
    leased: list[Lease] = []
    for step, purpose, started in ((1, Purpose.TRAIN, 2), (2, Purpose.TRAIN, 2), (2, Purpose.EVAL, 1)):
        await store.enqueue("r", GroupSpec(f"{purpose}-{step}", Task("t", {}), started, purpose, step=step))
        leased += await lease(store, started)
    await store.enqueue("r", GroupSpec("test", Task("t", {}), 3, Purpose.TEST, step=3))
    for number, one in enumerate(leased):
        await store.record_calls("r", one.attempt.id, [Call("c", completion_ids=(1, 2), logprobs=(0.0, 0.0))])
        outcome, rewards = Outcome(Ending.AGENT_ERROR), ()
        if number:
            outcome, rewards = SUCCEEDED, (Reward("f", number / 4),)
        await store.finish("r", one.attempt.id, FinishRequest(outcome, rewards=rewards))
    found = await store.read(digest_run, "r")
    assert found.states == {"agent_error": 1, "succeeded": 4, "queued": 3}
    assert found.purposes == {"train": 4, "eval": 1, "test": 3} and not found.trains_nothing
    assert (found.last_step, found.calls, found.tokens) == (3, 5, 10)
    assert found.train == (StepTotal(1, 2, 0.25, 0.0625), StepTotal(2, 2, 1.25, 0.8125))
    assert found.held_out == found.measured == (StepTotal(2, 1, 1.0, 1.0),)


async def test_a_group_that_is_scored_together_has_its_rewards_afterwards(store: Store) -> None:
    await store.enqueue("r", GroupSpec("g", Task("t", {}), 2, Purpose.EVAL, step=1))
    first, second = await lease(store, 2)
    await store.finish("r", first.attempt.id, FinishRequest(Outcome(Ending.LOST), retry=Retry.FREE))
    (first,) = await lease(store)
    for leased in (first, second):
        await store.finish("r", leased.attempt.id, FinishRequest(SUCCEEDED, awaits_group=True))
    assert (await store.read(digest_run, "r")).held_out == ()
    scoring = await store.lease_scoring("w", "r")
    assert scoring is not None
    await store.score("r", "g", Scores(scoring.number, {"g.0": 1.0, "g.1": None}))
    found = await store.read(digest_run, "r")
    assert [(one.count, one.total) for one in found.held_out] == [(1, 1.0)] and found.states["no_reward"] == 1
