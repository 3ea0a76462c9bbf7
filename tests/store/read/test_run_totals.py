"""Totals of a run that are kept and follow its events, on every database."""

import random

import pytest
from msgspec.structs import replace

from leyden.api.wire import FinishRequest, GroupSpec, RunSpec, Scores
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Call, Purpose, Reward, RunSettings, Task
from leyden.store.read.run_digest import RunDigest, digest_run, follow_run
from leyden.store.read.run_totals import RunTotals
from leyden.store.store import Store
from leyden.store.write.queue import LeasedAttempt, LeaseQuery

SUCCEEDED = Outcome(Ending.SUCCEEDED)


class Following:
    """Totals of run `r` that are compared with those that are read anew."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.totals: RunTotals | None = None

    async def check(self) -> RunDigest:
        """Follow the events since the last check; the digest must be that of everything."""
        self.totals, followed = await self.store.read(follow_run, "r", self.totals)
        assert followed == await self.store.read(digest_run, "r")
        return followed


async def lease(store: Store, count: int = 1) -> list[LeasedAttempt]:
    return await store.lease(LeaseQuery("w", count, "r", None))


async def test_totals_that_follow_the_events_are_those_of_everything(store: Store) -> None:
    """A random history of groups, leases, ends, retries, cancelled groups and new rewards."""
    chance, following = random.Random(7), Following(store)
    running: list[LeasedAttempt] = []
    ended: list[str] = []
    for number in range(120):
        match chance.randrange(6):
            case 0:
                purpose = chance.choice([Purpose.TRAIN, Purpose.TRAIN, Purpose.EVAL, Purpose.TEST])
                spec = GroupSpec(f"g{number}", Task(f"t{number % 3}", {}), 3, purpose, step=number // 20)
                await store.enqueue("r", spec)
            case 1 | 2:
                running += await lease(store, 2)
            case 3 | 4 if running:
                attempt = running.pop(chance.randrange(len(running))).attempt.id
                await store.record_calls("r", attempt, [Call("c", completion_ids=(1, 2), logprobs=(0.0, 0.0))])
                ending = chance.choice([Ending.SUCCEEDED, Ending.SUCCEEDED, Ending.AGENT_ERROR, Ending.LOST])
                rewards = (Reward("f", chance.choice([0.0, 0.25, 1.0])),) if ending is Ending.SUCCEEDED else ()
                await store.finish("r", attempt, FinishRequest(Outcome(ending), rewards=rewards))
                if rewards:
                    ended.append(attempt)
            case 5 if ended:
                again = Reward(f"again-{number}", chance.choice([0.5, 0.75]), source=f"again-{number}")
                await store.record_rewards("r", chance.choice(ended), [again], rescoring=True)
        if number == 70 and running:
            cancelled = running[0].attempt.rollout.rpartition(".")[0]
            await store.cancel_group("r", cancelled)
            running = [one for one in running if not one.attempt.rollout.startswith(f"{cancelled}.")]
        if chance.random() < 0.4:
            await following.check()
    found = await following.check()
    assert found.train and found.held_out and found.calls and {"lost", "agent_error", "succeeded"} & set(found.states)


async def test_only_steps_that_events_are_about_are_read_again(store: Store) -> None:
    for step in (1, 2):
        await store.enqueue("r", GroupSpec(f"step-{step}", Task("t", {}), 2, Purpose.TRAIN, step=step))
    totals, _ = await store.read(follow_run, "r", None)
    changed = {key: replace(counts, total=99.0) for key, counts in totals.steps.items()}
    (leased,) = await lease(store)
    touched = 1 if leased.attempt.id.startswith("step-1") else 2
    followed, _ = await store.read(follow_run, "r", replace(totals, steps=changed))
    assert {step: counts.total for (_, step), counts in followed.steps.items()} == {touched: 0.0, 3 - touched: 99.0}


async def test_a_group_that_is_scored_together_and_a_free_retry_are_followed(store: Store) -> None:
    following = Following(store)
    await store.enqueue("r", GroupSpec("g", Task("t", {}), 2, Purpose.EVAL, step=1))
    first, second = await lease(store, 2)
    await store.finish("r", first.attempt.id, FinishRequest(Outcome(Ending.LOST), retry=Retry.FREE))
    await following.check()
    (first,) = await lease(store)
    for leased in (first, second):
        await store.finish("r", leased.attempt.id, FinishRequest(SUCCEEDED, awaits_group=True))
    assert (await following.check()).held_out == ()
    scoring = await store.lease_scoring("w", "r")
    assert scoring is not None
    await store.score("r", "g", Scores(scoring.number, {"g.0": 1.0, "g.1": None}))
    found = await following.check()
    assert [(one.count, one.total) for one in found.held_out] == [(1, 1.0)] and found.states["no_reward"] == 1


async def test_a_new_run_with_the_name_of_a_deleted_one_starts_at_nothing(store: Store) -> None:
    following = Following(store)
    await store.enqueue("r", GroupSpec("g", Task("t", {}), 2, Purpose.TRAIN, step=1))
    assert (await following.check()).states == {"queued": 2}
    await store.delete_run("r")
    store.clock.now += 1  # type: ignore[attr-defined]
    await store.create_run(RunSpec("r", RunSettings()))
    assert (await following.check()).states == {}


@pytest.mark.parametrize("most", [0, 1])
async def test_after_too_many_events_everything_is_read(
    store: Store, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.store.read.run_totals._MOST_EVENTS", most)
    following = Following(store)
    await following.check()
    await store.enqueue("r", GroupSpec("g", Task("t", {}), 2, Purpose.TRAIN, step=1))
    await lease(store)
    assert (await following.check()).states == {"queued": 1, "running": 1}
