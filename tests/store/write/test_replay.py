"""Rollouts that continue a recorded attempt: what may be queued, and how their replayed calls are stored."""

import msgspec
import pytest
from msgspec.structs import replace
from sqlalchemy import select

from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.backoff import Backoff
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Attempt, Call, DivergedCall, Origin, Purpose, RunSettings, Task, VersionRun
from leyden.store.errors import Conflict, NotFound
from leyden.store.read import queries
from leyden.store.schema import calls
from leyden.store.store import Store
from leyden.store.write import attempts

TASK = Task("t", {"q": 1})
FIRST = Call(
    "a",
    prompt_ids=(1, 2),
    completion_ids=(3,),
    logprobs=(-0.5,),
    versions=(VersionRun(1, 4),),
    messages=({"role": "user", "content": "hi"},),
    response={"role": "assistant", "content": "ho"},
    role="writer",
    started=1.0,
    ended=2.0,
)
SECOND = replace(FIRST, id="b", parent="a", kept_ids=3, kept_messages=2, prompt_ids=(7,), started=3.0, ended=4.0)


async def start(store: Store, group: str, purpose: Purpose = Purpose.TRAIN, origin: Origin | None = None) -> Attempt:
    await store.enqueue("r", GroupSpec(group, TASK, purpose=purpose, origin=origin))
    (lease,) = await store.lease(LeaseRequest("w"))
    return lease.attempt


async def recorded(store: Store, group: str = "g", purpose: Purpose = Purpose.TRAIN) -> Attempt:
    attempt = await start(store, group, purpose)
    await store.record_calls("r", attempt.id, [FIRST, SECOND])
    return attempt


async def test_a_group_names_the_attempt_that_its_rollouts_continue(store: Store) -> None:
    origin = Origin((await recorded(store)).id, 1)
    branch = await start(store, "h", origin=origin)
    assert branch.origin == origin
    detail = await store.read(queries.get_rollout, "r", branch.rollout)
    assert detail.rollout.origin == detail.attempts[0].origin == origin
    with pytest.raises(Conflict, match="exists with origin"):
        await store.enqueue("r", GroupSpec("h", TASK))


async def test_an_origin_is_of_the_same_run_and_task_and_not_from_evaluation_into_training(store: Store) -> None:
    origin = Origin((await recorded(store)).id, 1)
    held_out = Origin((await recorded(store, "held-out", Purpose.TEST)).id, 1)
    await store.create_run(RunSpec("other"))
    for spec, message in (
        (GroupSpec("h", TASK, origin=held_out), "purpose test, and this group is trained on"),
        (GroupSpec("h", Task("u", 1), origin=origin), "is of task 't', not 'u'"),
        (GroupSpec("h", TASK, origin=Origin(origin.attempt, 3)), "has made 2 calls, not 3"),
    ):
        with pytest.raises(Conflict, match=message):
            await store.enqueue("r", spec)
    with pytest.raises(NotFound, match="no attempt"):
        await store.enqueue("other", GroupSpec("h", TASK, origin=origin))
    assert (await start(store, "eval", Purpose.EVAL, origin)).origin == origin


async def test_a_run_that_replays_nothing_takes_no_origin(store: Store) -> None:
    await store.create_run(RunSpec("careful", RunSettings(replay=False)))
    await store.enqueue("careful", GroupSpec("g", TASK))
    (lease,) = await store.lease(LeaseRequest("w"))
    await store.record_calls("careful", lease.attempt.id, [FIRST])
    with pytest.raises(Conflict, match="replays nothing"):
        await store.enqueue("careful", GroupSpec("h", TASK, origin=Origin(lease.attempt.id, 1)))


async def test_a_retry_replays_nothing_in_a_run_that_replays_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "RETRY_BACKOFF", Backoff(first_s=0.0, max_s=0.0))
    for replays in (True, False):
        run = f"replay-{replays}"
        await store.create_run(RunSpec(run, RunSettings(replay=replays)))
        await store.enqueue(run, GroupSpec(f"of-{run}", TASK))
        (lease,) = await store.lease(LeaseRequest("w", run=run))
        await store.record_calls(run, lease.attempt.id, [FIRST])
        await store.finish(run, lease.attempt.id, FinishRequest(Outcome(Ending.LOST)))
        (retry,) = await store.lease(LeaseRequest("w", run=run))
        assert retry.attempt.number == 2
        assert retry.attempt.origin == (Origin(lease.attempt.id, 1) if replays else None)


async def test_a_replayed_call_is_stored_without_its_tokens_and_read_whole(store: Store) -> None:
    origin = (await recorded(store)).id
    branch = await start(store, "h", origin=Origin(origin, 2))
    own = {"origin": origin, "role": "reader", "span": "0" * 15 + "1", "started": 8.0, "ended": 9.0}
    replayed = [replace(call, **own) for call in (FIRST, SECOND)]
    sampled = replace(SECOND, id="c", parent="b", kept_ids=5)
    assert await store.record_calls("r", branch.id, [*replayed, sampled]) == 3
    assert await store.record_calls("r", branch.id, [*replayed, sampled]) == 0
    episode = await store.read(queries.get_episode, "r", branch.id)
    assert episode.calls == (*replayed, sampled)
    assert episode.prompt_ids(sampled) == (1, 2, 3, 7, 3, 7)
    assert await store.read(queries.response_chain, "r", branch.id, "c") == [*replayed, sampled]
    rows = await store.read(
        lambda connection: connection.execute(select(calls).where(calls.c.attempt_id == branch.id)).all()
    )
    assert [row.sampled for row in rows] == [0, 0, 1]
    assert [row.completion_ids is None for row in rows] == [True, True, False]
    assert b"content" not in rows[0].body
    assert [episode.exclusion_reason(call) for call in episode.calls] == ["replayed", "replayed", None]


async def test_a_replayed_call_that_was_recorded_after_others_is_stored_whole(store: Store) -> None:
    origin = (await recorded(store)).id
    branch = await start(store, "h", origin=Origin(origin, 2))
    alone = replace(SECOND, origin=origin, parent=None, kept_ids=0, kept_messages=0, prompt_ids=(1, 2, 3, 7))
    await store.record_calls("r", branch.id, [alone])
    assert (await store.read(queries.get_episode, "r", branch.id)).calls == (alone,)
    with pytest.raises(NotFound, match="has sampled no call 'c'"):
        await store.record_calls("r", branch.id, [replace(alone, id="c", origin=branch.id)])


async def test_the_first_divergence_is_kept(store: Store) -> None:
    branch = await start(store, "h", origin=Origin((await recorded(store)).id, 2))
    for number in (2, 3):
        await store.record_divergence("r", branch.id, DivergedCall(number, "another date"))
    episode = await store.read(queries.get_episode, "r", branch.id)
    assert episode.attempt.diverged == DivergedCall(2, "another date")
    assert msgspec.json.decode(msgspec.json.encode(episode), type=type(episode)).attempt == episode.attempt


async def test_a_rollout_starts_anew_only_if_it_may_be_to_blame_for_both_ends_at_a_call(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "RETRY_BACKOFF", Backoff(first_s=0.0, max_s=0.0))
    await store.create_run(RunSpec("long", RunSettings(max_attempts=9)))
    await store.enqueue("long", GroupSpec("g", TASK))
    kept = Origin("g.0.1", 2)

    async def end(retry: Retry, *calls: Call) -> Origin | None:
        """Start the next attempt, record what it does, and end it; returns what it replays."""
        (lease,) = await store.lease(LeaseRequest("w", run="long"))
        replayed = [replace(call, origin=kept.attempt) for call in calls] if lease.attempt.origin else calls
        await store.record_calls("long", lease.attempt.id, replayed)
        await store.finish("long", lease.attempt.id, FinishRequest(Outcome(Ending.LOST), retry=retry))
        return lease.attempt.origin

    both = FIRST, SECOND
    assert await end(Retry.FREE, *both) is None  # the server was started again
    assert await end(Retry.ALONE, *both) == kept  # its host was killed: the first end that it may have caused
    assert await end(Retry.FREE, *both) == kept
    assert await end(Retry.CHARGED, FIRST) == kept  # it died while it replayed: at another call
    assert await end(Retry.ALONE, *both) == kept
    assert await end(Retry.FREE) is None
