"""Workers that go away at the worst moment: what was granted to them is not lost, and not charged."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from leyden.api.wire import EventCursor, FinishRequest, GroupSpec, Lease, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import State, Task
from leyden.store.read import queries
from leyden.store.store import Store
from leyden.store.write.lease_dispatcher import LeaseDispatcher

GONE, GONE_AT_ONCE = LeaseRequest("gone", wait=30), LeaseRequest("gone")


async def queue_one(store: Store) -> None:
    await store.enqueue("r", GroupSpec("g", Task("t", {}), max_attempts=1))


async def happened(store: Store, kind: str) -> None:
    assert (await store.events("r", EventCursor(kind=kind, wait=30))).events


async def check_given_back(store: Store) -> None:
    await happened(store, "attempt.ended")
    detail = await store.read(queries.get_rollout, "r", "g.0")
    assert detail.rollout.state is State.QUEUED  # though one attempt was all it had
    (leased,) = await store.lease(LeaseRequest("here"))
    assert leased.attempt.id == "g.0.2"


async def test_a_worker_who_leaves_while_it_is_served_is_not_charged_for(store: Store) -> None:
    await queue_one(store)
    gate = asyncio.Event()

    async def lease(queries: Sequence[LeaseRequest]) -> list[list[Lease]]:
        leased = await store._lease(queries)
        await gate.wait()
        return leased

    dispatcher = LeaseDispatcher(lease, store._return_lease)
    asking = asyncio.create_task(dispatcher.lease(GONE))
    await happened(store, "attempt.started")
    asking.cancel()
    gate.set()
    await check_given_back(store)
    await dispatcher.close()


async def test_a_worker_who_leaves_between_lease_and_answer_is_not_charged_for(store: Store) -> None:
    await queue_one(store)

    async def lease(queries: Sequence[LeaseRequest]) -> list[list[Lease]]:
        leased = await store._lease(queries)
        asyncio.get_running_loop().call_soon(asking.cancel)  # after the lease is set, before the worker wakes up
        return leased

    dispatcher = LeaseDispatcher(lease, store._return_lease)
    asking = asyncio.create_task(dispatcher.lease(GONE))
    await check_given_back(store)
    assert asking.cancelled()
    await dispatcher.close()


async def test_the_dispatcher_survives_a_failing_store(store: Store) -> None:
    await queue_one(store)
    failures = iter([RuntimeError("the disk is gone")])

    async def lease(queries: Sequence[LeaseRequest]) -> list[list[Lease]]:
        for failure in failures:
            raise failure
        return await store._lease(queries)

    dispatcher = LeaseDispatcher(lease, store._return_lease)
    first, second = await asyncio.gather(
        dispatcher.lease(GONE_AT_ONCE), dispatcher.lease(GONE_AT_ONCE), return_exceptions=True
    )
    assert isinstance(first, RuntimeError)
    assert isinstance(second, RuntimeError)
    assert len(await dispatcher.lease(GONE_AT_ONCE)) == 1
    await dispatcher.close()


async def test_a_worker_who_leaves_while_the_store_fails_stays_cancelled(store: Store) -> None:
    async def lease(queries: Sequence[LeaseRequest]) -> list[list[Lease]]:
        asyncio.get_running_loop().call_soon(asking.cancel)  # after the failure is set, before the worker wakes up
        raise RuntimeError("the disk is gone")

    dispatcher = LeaseDispatcher(lease, store._return_lease)
    asking = asyncio.create_task(dispatcher.lease(GONE))
    await asyncio.wait((asking,))
    assert asking.cancelled()
    await dispatcher.close()


async def test_idle_workers_cost_no_operations(store: Store) -> None:
    await queue_one(store)
    waiting = [asyncio.create_task(store.lease(LeaseRequest(f"w{n}", wait=30, run="r"))) for n in range(100)]
    await happened(store, "attempt.started")
    before = store.writer.operations
    await asyncio.gather(*(store.enqueue("r", GroupSpec(f"h{n}", Task("t", {}))) for n in range(3)))
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    while sum(task.done() for task in waiting) < 4:
        await asyncio.wait([task for task in waiting if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    assert store.writer.operations - before <= 3 + 3  # three groups, and a lease for each at the most
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_retry_that_waits_for_its_time_is_known_after_a_restart(tmp_path: Path) -> None:
    offset, stopped = 0.0, time.time()  # the clock stands still until the store was asked after the restart

    def clock() -> float:
        return stopped if offset == 0 else time.time() - offset

    store = await Store(tmp_path / "leyden.db", clock).start()
    await store.create_run(RunSpec("r"))
    await store.enqueue("r", GroupSpec("g", Task("t", {})))
    (first,) = await store.lease(GONE_AT_ONCE)
    await store.finish("r", first.attempt.id, FinishRequest(Outcome(Ending.ENGINE_ERROR)))
    await store.close()
    store = await Store(tmp_path / "leyden.db", clock).start()
    assert await store.lease(GONE_AT_ONCE) == []
    offset = time.time() - stopped
    async with asyncio.timeout(60):
        (second,) = await store.lease(GONE)
    assert second.attempt.id == "g.0.2"
    await store.close()


async def test_workers_of_any_run_are_woken_for_the_new_rollouts_of_every_run(store: Store) -> None:
    await store.create_run(RunSpec("s"))
    served: list[LeaseRequest] = []
    all_served = asyncio.Event()

    async def lease(requests: Sequence[LeaseRequest]) -> list[list[Lease]]:
        leased = await store._lease(requests)
        served.extend(requests)
        if len(served) == 2:
            all_served.set()
        return leased

    dispatcher = LeaseDispatcher(lease, store._return_lease)
    waiting = [asyncio.create_task(dispatcher.lease(LeaseRequest(worker, wait=30))) for worker in ("one", "two")]
    await all_served.wait()
    await asyncio.gather(*(store.enqueue(run, GroupSpec(f"g-{run}", Task("t", {}))) for run in ("r", "s")))
    for run in ("r", "s"):  # at the same moment
        dispatcher.schedule(run, 0.0)
    leased = await asyncio.gather(*waiting)
    assert sorted(one.run for some in leased for one in some) == ["r", "s"]
    await dispatcher.close()
