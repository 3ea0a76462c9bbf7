"""What the store promises, on every database it supports."""

import asyncio

import pytest
from sqlalchemy import text

from leyden.api.views import SeriesQuery
from leyden.api.wire import EventCursor, FinishRequest, GroupSpec, LeaseRequest, ListedRollout, RolloutPage, RunSpec
from leyden.outcomes import RETRY_BACKOFF, Ending, Outcome, Retry
from leyden.records import (
    Call,
    CallCredit,
    EventKind,
    Metric,
    Purpose,
    Reward,
    RewardKind,
    RunSettings,
    Span,
    State,
    StepCredits,
    Task,
    Version,
    VersionRun,
)
from leyden.store.errors import Conflict, NotFound
from leyden.store.read import queries, views
from leyden.store.store import Store
from leyden.store.write import lease_expiry
from leyden.store.write.queue import lease as leases_together

DONE = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("final", 1.0),))


def advance(store: Store, seconds: float) -> None:
    store.clock.now += seconds


async def queue(
    store: Store, group: str, size: int = 1, priority: int = 0, purpose: Purpose = Purpose.TRAIN, run: str = "r"
) -> None:
    await store.enqueue(run, GroupSpec(group, Task("t", {"q": 1}), size, purpose, priority))


async def lease(store: Store, count: int = 1, worker: str = "w", pool: str | None = None) -> list[str]:
    return [grant.attempt.id for grant in await store.lease(LeaseRequest(worker, count, pool=pool))]


async def kinds(store: Store) -> list[str]:
    return [event.kind for event in (await store.events("r", EventCursor())).events]


async def test_creating_again_is_harmless_and_creating_differently_is_refused(store: Store) -> None:
    spec = RunSpec("r", RunSettings(lease_s=60, max_attempts=2))
    assert await store.create_run(spec) == await store.create_run(spec)
    with pytest.raises(Conflict, match="settings"):
        await store.create_run(RunSpec("r", RunSettings(lease_s=1)))
    group = GroupSpec("g", Task("t", {"q": 1}), 3)
    assert await store.enqueue("r", group) == await store.enqueue("r", group)
    with pytest.raises(Conflict, match="size"):
        await store.enqueue("r", GroupSpec("g", Task("t", {"q": 1}), 4))
    with pytest.raises(Conflict, match="another input"):
        await store.enqueue("r", GroupSpec("h", Task("t", {"q": 2})))
    with pytest.raises(NotFound, match="nowhere"):
        await store.enqueue("nowhere", group)
    assert len(await lease(store, 10)) == 3
    await store.create_run(RunSpec("another"))
    with pytest.raises(Conflict, match="run 'r' has a group 'g'"):
        await store.enqueue("another", group)


async def test_a_refused_operation_leaves_no_trace(store: Store) -> None:
    with pytest.raises(Conflict):
        await queue(store, "g")
        await store.enqueue("r", GroupSpec("g", Task("new", {}), 2))
    await store.enqueue("r", GroupSpec("h", Task("new", {"another": "input"})))  # the task was not kept
    assert await kinds(store) == ["run.created", "group.queued", "group.queued"]


async def test_no_rollout_is_leased_twice(store: Store) -> None:
    await queue(store, "g", 20)
    leased = await asyncio.gather(*(lease(store, 3, worker=f"w{n}") for n in range(10)))
    ids = [attempt for some in leased for attempt in some]
    assert len(ids) == len(set(ids)) == 20


async def test_groups_take_turns_and_priority_doubles_the_share(store: Store) -> None:
    await queue(store, "large", 100, purpose=Purpose.EVAL)
    await queue(store, "small", 4, purpose=Purpose.EVAL)
    await queue(store, "urgent", 8, priority=1, purpose=Purpose.EVAL)
    first = [attempt.partition(".")[0] for attempt in await lease(store, 17)]
    assert {name: first.count(name) for name in ("large", "small", "urgent")} == {"large": 5, "small": 4, "urgent": 8}


async def test_a_group_that_comes_late_does_not_wait_for_all_that_came_before(store: Store) -> None:
    await queue(store, "early", 1000, purpose=Purpose.EVAL)
    await lease(store, 500)
    await queue(store, "late", 2, purpose=Purpose.EVAL)
    assert {"late.0.1", "late.1.1"} <= set(await lease(store, 5))


async def test_workers_of_one_run_and_of_any_run_get_no_rollout_twice(store: Store) -> None:
    await queue(store, "g", 3)
    of_one, of_any = await store.write(leases_together, [LeaseRequest("a", 2, run="r"), LeaseRequest("b", 2)])
    assert (len(of_one), len(of_any)) == (2, 1)
    assert len({lease.attempt.rollout for lease in (*of_one, *of_any)}) == 3


async def test_groups_to_train_on_are_leased_oldest_first(store: Store) -> None:
    await store.create_run(RunSpec("other"))
    await queue(store, "old", 3)
    (first,) = await lease(store)
    await queue(store, "new", 2)
    await queue(store, "newest", 2)
    await queue(store, "others", 6, run="other")
    await queue(store, "eval", 2, priority=10, purpose=Purpose.EVAL)
    advance(store, 1)
    await store.finish("r", first, FinishRequest(Outcome(Ending.LOST), retry=Retry.FREE))
    leased = await lease(store, 20)
    assert [id for id in leased if id.startswith(("old", "new"))] == [
        *("old.0.2", "old.1.1", "old.2.1", "new.0.1", "new.1.1", "newest.0.1", "newest.1.1"),
    ]
    assert {"eval.0.1", "eval.1.1"} <= set(leased[:4])
    for share in (6, 8, 10):  # runs take turns
        assert abs(sum(id.startswith("others") for id in leased[:share]) - (share - 3) / 2) <= 1


async def test_an_urgent_group_to_train_on_does_not_wait_for_the_others_of_its_run(store: Store) -> None:
    await queue(store, "early", 100)
    await queue(store, "urgent", 2, priority=2)
    assert {"urgent.0.1", "urgent.1.1"} <= set(await lease(store, 4))


async def test_a_parked_rollout_is_leased_when_its_group_is_requested_again(store: Store) -> None:
    await queue(store, "a", 3)
    assert await lease(store, 2) == ["a.0.1", "a.1.1"]
    await queue(store, "b")
    await queue(store, "never", 2, priority=10, purpose=Purpose.EVAL)
    await store.create_run(RunSpec("other"))
    await queue(store, "others", run="other")
    await store.park("r")
    await store.finish("r", "a.0.1", FinishRequest(Outcome(Ending.LOST), retry=Retry.FREE))
    advance(store, 61)
    await store.expire_leases()
    advance(store, 60)
    assert await lease(store, 10) == ["others.0.1"]
    waiting = asyncio.create_task(store.lease(LeaseRequest("w", wait=30)))
    await asyncio.sleep(0)
    await queue(store, "new")
    assert [one.attempt.id for one in await waiting] == ["new.0.1"]
    waiting = asyncio.create_task(store.lease(LeaseRequest("w", wait=30)))
    await asyncio.sleep(0)
    await queue(store, "b")
    assert [one.attempt.id for one in await waiting] == ["b.0.1"]
    await queue(store, "a", 3)
    await queue(store, "newest")
    assert await lease(store, 10) == ["a.0.2", "a.1.2", "a.2.1", "newest.0.1"]
    await store.park("r")
    await store.finish("r", "b.0.1", DONE)
    known = await kinds(store)
    await queue(store, "b")
    assert await kinds(store) == known  # it is finished


async def test_an_attempt_that_ran_while_its_group_was_parked_and_requested_again_is_retried(store: Store) -> None:
    await queue(store, "g", 2)
    (running,) = await lease(store)
    await store.park("r")
    await queue(store, "g", 2)
    await store.finish("r", running, FinishRequest(Outcome(Ending.LOST), retry=Retry.FREE))
    assert await lease(store, 10) == ["g.0.2", "g.1.1"]


async def test_attempts_of_an_evaluation_start_over_when_their_run_is_parked(store: Store) -> None:
    await queue(store, "train")
    await queue(store, "eval", purpose=Purpose.EVAL)
    assert set(await lease(store, 2)) == {"train.0.1", "eval.0.1"}
    await store.park("r")
    reply = await store.heartbeat("w", ["train.0.1", "eval.0.1"])
    assert list(reply.expires) == ["train.0.1"] and [one.attempt for one in reply.ended] == ["eval.0.1"]
    assert await lease(store, 2) == []
    await queue(store, "eval", purpose=Purpose.EVAL)
    assert await lease(store, 2) == ["eval.0.2"]


async def test_the_same_group_can_be_requested_with_another_priority(store: Store) -> None:
    await queue(store, "g", priority=10, purpose=Purpose.EVAL)
    await queue(store, "g", priority=0, purpose=Purpose.EVAL)
    assert await lease(store, 2) == ["g.0.1"]


async def test_a_worker_can_ask_for_one_run_only(store: Store) -> None:
    await queue(store, "g")
    await store.create_run(RunSpec("other"))
    assert await store.lease(LeaseRequest("w", run="other")) == []
    assert len(await store.lease(LeaseRequest("w", run="r"))) == 1


async def test_waiting_for_work_ends_when_work_comes(store: Store) -> None:
    waiting = [asyncio.create_task(store.lease(LeaseRequest(f"w{n}", wait=30))) for n in range(5)]
    await asyncio.sleep(0)
    await queue(store, "g", 2)
    await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    await queue(store, "h", 3)
    for grants in await asyncio.gather(*waiting):
        assert len(grants) == 1


async def test_waiting_for_work_ends_empty_when_time_is_up(store: Store) -> None:
    assert await store.lease(LeaseRequest("w", wait=0.05)) == []


async def test_work_is_not_given_to_a_worker_who_has_left(store: Store) -> None:
    gone = asyncio.create_task(store.lease(LeaseRequest("gone", wait=30)))
    await asyncio.sleep(0.05)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await queue(store, "g")
    assert await lease(store) == ["g.0.1"]


async def test_a_lease_lives_on_heartbeats_and_dies_without(store: Store) -> None:
    await queue(store, "g", 2)
    kept, dropped = await lease(store, 2)
    advance(store, 50)
    reply = await store.heartbeat("w", [kept])
    assert reply.expires == {kept: store.clock() + 60}
    advance(store, 20)
    assert await store.expire_leases() == 1
    ended = (await store.heartbeat("w", [kept, dropped, "never"])).ended
    assert [(end.attempt, end.outcome and end.outcome.ending) for end in ended] == [
        (dropped, Ending.LOST),
        ("never", None),
    ]
    assert "w sent no heartbeat" in (ended[0].outcome.message if ended[0].outcome else "")


async def test_a_heartbeat_of_another_worker_renews_nothing(store: Store) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    reply = await store.heartbeat("stranger", [attempt])
    assert reply.expires == {}
    advance(store, 61)
    assert await store.expire_leases() == 1


async def test_an_expired_lease_makes_the_next_attempt_up_to_the_limit(store: Store) -> None:
    await queue(store, "g")
    for number in (1, 2):
        assert await lease(store) == [f"g.0.{number}"]
        advance(store, 61)
        await store.expire_leases()
        advance(store, 60)
    assert await lease(store) == []
    detail = await store.read(queries.get_rollout, "r", "g.0")
    assert detail.rollout.state is State.FINISHED
    assert detail.rollout.outcome is not None
    assert detail.rollout.outcome.ending is Ending.LOST
    assert [attempt.outcome and attempt.outcome.ending for attempt in detail.attempts] == [Ending.LOST, Ending.LOST]
    assert (await store.read(queries.get_group, "r", "g")).finished is not None


async def test_what_must_be_tried_again_comes_first(store: Store) -> None:
    await queue(store, "g", 5)
    first = (await lease(store))[0]
    await store.finish("r", first, FinishRequest(Outcome(Ending.ENGINE_ERROR, "the engine died")))
    assert await lease(store) == ["g.1.1"]  # but not at once
    advance(store, 0.6)
    assert await lease(store) == ["g.0.2"]


async def test_each_retry_waits_longer_unless_it_is_free(store: Store) -> None:
    await store.enqueue("r", GroupSpec("g", Task("t", {"q": 1}), max_attempts=9))
    for number, pause in enumerate([0.5, 1.0, 2.0, 4.0], start=1):
        assert await lease(store) == [f"g.0.{number}"]
        await store.finish("r", f"g.0.{number}", FinishRequest(Outcome(Ending.LOST)))
        advance(store, 0.9 * pause)
        assert await lease(store) == []
        advance(store, 0.2 * pause)
    assert await lease(store) == ["g.0.5"]
    await store.finish("r", "g.0.5", FinishRequest(Outcome(Ending.LOST), retry=Retry.FREE))
    assert await lease(store) == ["g.0.6"]
    assert RETRY_BACKOFF.limit_s(100) == 60


async def test_who_waits_is_served_when_the_time_of_a_retry_has_come(store: Store) -> None:
    await queue(store, "g")
    await store.finish("r", (await lease(store))[0], FinishRequest(Outcome(Ending.ENGINE_ERROR)))
    waiting = asyncio.create_task(store.lease(LeaseRequest("w", wait=30)))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    advance(store, 0.5)
    async with asyncio.timeout(20):
        (grant,) = await waiting
    assert grant.attempt.id == "g.0.2"


async def test_a_free_retry_costs_no_attempt_and_one_alone_does_so_once(store: Store) -> None:
    await queue(store, "g")  # two attempts
    free, alone = (FinishRequest(Outcome(Ending.LOST), retry=retry) for retry in (Retry.FREE, Retry.ALONE))
    for number, report in enumerate([free, free, alone, alone], start=1):
        (grant,) = await store.lease(LeaseRequest("w"))
        assert (grant.attempt.number, grant.alone) == (number, number == 4)
        left = (await store.finish("r", grant.attempt.id, report)).rollout
        advance(store, 60)
    assert left.state is State.QUEUED  # the first that it was charged for
    (grant,) = await store.lease(LeaseRequest("w"))
    assert grant.alone
    assert (await store.finish("r", grant.attempt.id, alone)).rollout.state is State.FINISHED


async def test_only_the_first_crash_of_the_engine_costs_a_rollout_no_attempt(store: Store) -> None:
    await queue(store, "g")  # two attempts
    lost = FinishRequest(Outcome(Ending.LOST))
    crash = FinishRequest(Outcome(Ending.ENGINE_ERROR, "the engine crashed"), retry=Retry.FREE_ONCE)
    await store.finish("r", (await lease(store))[0], lost)
    advance(store, 60)
    left = (await store.finish("r", (await lease(store))[0], crash)).rollout
    assert left.state is State.QUEUED
    (again,) = await lease(store)  # at once
    assert (await store.finish("r", again, crash)).rollout.state is State.FINISHED


async def test_a_worker_that_withdraws_is_answered_at_once(store: Store) -> None:
    waiting = [asyncio.create_task(store.lease(LeaseRequest(name, wait=30))) for name in ("leaving", "staying")]
    await asyncio.sleep(0)
    store.withdraw("leaving")
    async with asyncio.timeout(20):
        assert await waiting[0] == []
    await queue(store, "g")
    assert len(await waiting[1]) == 1


@pytest.mark.parametrize("ending", [Ending.AGENT_ERROR, Ending.TIMEOUT, Ending.NO_REWARD, Ending.CANCELLED])
async def test_endings_that_are_the_agents_own_are_not_retried(store: Store, ending: Ending) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    finished = await store.finish("r", attempt, FinishRequest(Outcome(ending, "why")))
    assert finished.rollout.state is State.FINISHED
    assert finished.rollout.outcome == Outcome(ending, "why")
    assert await lease(store) == []


async def test_success_without_a_reward_is_no_reward_and_never_zero(store: Store) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    finished = await store.finish("r", attempt, FinishRequest(Outcome(Ending.SUCCEEDED), result=42))
    assert finished.counted
    assert finished.outcome.ending is Ending.NO_REWARD
    episode = await store.read(queries.get_episode, "r", attempt)
    assert episode.attempt.result == 42
    assert episode.final_reward(0.0) is None


async def test_completing_is_exactly_once(store: Store) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    assert (await store.finish("r", attempt, DONE)).counted
    late = FinishRequest(Outcome(Ending.AGENT_ERROR, "no, it failed"), result="late", rewards=(Reward("other", 5.0),))
    repeated = await store.finish("r", attempt, late)
    assert not repeated.counted
    assert repeated.outcome.ending is Ending.SUCCEEDED
    episode = await store.read(queries.get_episode, "r", attempt)
    assert [reward.id for reward in episode.rewards] == ["final"]
    (logged,) = (await store.events("r", EventCursor(kind="attempt.late"))).events
    assert logged.data["result"] == "late"  # kept, though it counts nowhere
    assert logged.data["outcome"]["message"] == "no, it failed"


async def test_a_late_result_of_a_lost_attempt_counts_nowhere(store: Store) -> None:
    await queue(store, "g")
    (first,) = await lease(store)
    advance(store, 61)
    await store.expire_leases()
    advance(store, 1)
    (second,) = await lease(store)
    assert not (await store.finish("r", first, DONE)).counted
    failed = FinishRequest(Outcome(Ending.AGENT_ERROR, "boom"))
    assert (await store.finish("r", second, failed)).rollout.outcome == Outcome(Ending.AGENT_ERROR, "boom")
    assert (await store.read(queries.get_episode, "r", second)).rewards == ()


async def test_cancelling_ends_everything_at_once_and_reaches_the_worker_at_its_heartbeat(store: Store) -> None:
    await queue(store, "g", 3)
    finished, running = await lease(store, 2)
    await store.finish("r", finished, DONE)
    assert await store.cancel_group("r", "g") == 2
    assert await store.cancel_group("r", "g") == 0
    (ended,) = (await store.heartbeat("w", [running])).ended
    assert ended.outcome is not None
    assert ended.outcome.ending is Ending.CANCELLED
    assert not (await store.finish("r", running, DONE)).counted
    endings = [
        r.outcome.ending for r in await store.read(queries.list_rollouts, "r", RolloutPage(limit=9)) if r.outcome
    ]
    assert endings == [Ending.SUCCEEDED, Ending.CANCELLED, Ending.CANCELLED]
    assert (await store.read(queries.get_group, "r", "g")).finished is not None
    with pytest.raises(NotFound):
        await store.cancel_rollout("r", "g.9")


async def test_a_call_is_kept_to_the_last_token(store: Store) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    first = Call(
        "c1",
        prompt_ids=(0, 255, 65_535, 151_935),
        completion_ids=(7, 70_000),
        logprobs=(-0.5, -0.25),
        allowed=(0.0, 0.75),
        versions=(VersionRun(1, 3), VersionRun(1, 4)),
        messages=({"role": "user", "content": "h\u0000é\U0001f600"},),
        response={"role": "assistant", "content": ""},
        tools=({"name": "calculator"},),
        request={"temperature": 0},
        role="solver",
        started=1.5,
        ended=2.5,
    )
    second = Call(
        "c2", parent="c1", kept_ids=6, kept_messages=2, prompt_ids=(1,), completion_ids=(2,), logprobs=(-1.0,)
    )
    assert await store.record_calls("r", attempt, [first, second]) == 2
    assert await store.record_calls("r", attempt, [first]) == 0
    episode = await store.read(queries.get_episode, "r", attempt)
    assert episode.calls == (first, second)
    assert episode.prompt_ids(second) == (0, 255, 65_535, 151_935, 7, 70_000, 1)


async def test_a_call_that_does_not_fit_is_refused(store: Store) -> None:
    await queue(store, "g", 2)
    attempt, other = await lease(store, 2)
    await store.record_calls("r", attempt, [Call("c1", prompt_ids=(1, 2), completion_ids=(3,))])
    with pytest.raises(NotFound, match="parent"):
        await store.record_calls("r", other, [Call("c2", parent="c1", kept_ids=1)])
    with pytest.raises(Conflict, match="only 3"):
        await store.record_calls("r", attempt, [Call("c2", parent="c1", kept_ids=4)])
    with pytest.raises(Conflict, match="another id"):
        await store.record_calls("r", attempt, [Call("c1", prompt_ids=(1, 2), completion_ids=(4,))])
    with pytest.raises(NotFound):
        await store.record_calls("elsewhere", attempt, [Call("c9")])
    await store.finish("r", attempt, DONE)
    with pytest.raises(Conflict, match="succeeded"):
        await store.record_calls("r", attempt, [Call("c3")])


async def test_rewards_find_their_owner(store: Store) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    await store.record_calls("r", attempt, [Call("c1"), Call("c2")])
    step = Reward("s", 0.3, RewardKind.STEP)
    await store.record_rewards("r", attempt, [step])
    await store.record_calls("r", attempt, [Call("c3")])
    assert await store.record_rewards("r", attempt, [step]) == 0  # sent again, it stays where it was
    with pytest.raises(Conflict, match=r"0\.3"):
        await store.record_rewards("r", attempt, [Reward("s", 0.4, RewardKind.STEP)])
    for other in (Reward("s", 0.3), Reward("s", 0.3, RewardKind.STEP, span="1" * 16)):  # of the attempt, of a span
        with pytest.raises(Conflict, match="another id"):
            await store.record_rewards("r", attempt, [other])
    with pytest.raises(NotFound, match="c9"):
        await store.record_rewards("r", attempt, [Reward("x", 1.0, RewardKind.STEP, call="c9")])
    (kept,) = (await store.read(queries.get_episode, "r", attempt)).rewards
    assert kept.call == "c2"


async def test_a_final_reward_has_one_source(store: Store) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    await store.record_rewards("r", attempt, [Reward("a", 1.0, source="agent")])
    with pytest.raises(Conflict, match="one source"):
        await store.record_rewards("r", attempt, [Reward("b", 0.0, source="grader")])


async def test_rescoring_replaces_the_reward_and_keeps_the_old(store: Store) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    await store.finish("r", attempt, DONE)
    with pytest.raises(Conflict):
        await store.record_rewards("r", attempt, [Reward("second", 0.25)])
    await store.record_rewards("r", attempt, [Reward("second", 0.25, source="rescore")], rescoring=True)
    episode = await store.read(queries.get_episode, "r", attempt)
    assert len(episode.rewards) == 2
    assert episode.final_reward(0.0) == 0.25
    assert (await store.read(queries.summarise_run, "r")).mean_reward == 0.25
    assert [rollout.reward for rollout in await listed(store)] == [0.25]


async def listed(store: Store) -> list[ListedRollout]:
    return await store.read(queries.list_rollouts, "r", RolloutPage(limit=100))


async def test_a_failed_rollout_has_the_failure_reward_in_lists_and_means(store: Store) -> None:
    await store.create_run(RunSpec("strict", RunSettings(failure_reward=-1.0, max_attempts=1)))
    await store.enqueue("strict", GroupSpec("s", Task("t", {}), 4, step=3))
    endings = (Ending.SUCCEEDED, Ending.AGENT_ERROR, Ending.TIMEOUT, Ending.LOST)
    for attempt, ending in zip(await lease(store, 4), endings, strict=True):
        await store.record_calls("strict", attempt, [Call("c", completion_ids=(1, 2), logprobs=(0.0, 0.0))])
        await store.finish("strict", attempt, DONE if ending is Ending.SUCCEEDED else FinishRequest(Outcome(ending)))
    found = await store.read(queries.list_rollouts, "strict", RolloutPage(limit=10))
    assert [rollout.reward for rollout in found] == [1.0, -1.0, -1.0, None]
    assert [(rollout.step, rollout.calls, rollout.tokens) for rollout in found] == [(3, 1, 2)] * 4
    assert (await store.read(queries.summarise_run, "strict")).mean_reward == pytest.approx(-1 / 3)


async def test_a_metric_of_a_repeated_step_replaces_the_earlier_one(store: Store) -> None:
    await store.record_metrics("r", [Metric(1, "loss", 3.0), Metric(2, "loss", 2.0)])
    await store.record_metrics("r", [Metric(2, "loss", 1.5)])
    found = [metric for _, metric in await store.read(queries.list_metrics, "r", after=0, limit=100)]
    assert [(metric.step, metric.value) for metric in found] == [(1, 3.0), (2, 1.5)]


async def test_policies_have_metrics_of_the_same_name_and_a_run_shows_those_of_the_one_it_trains(store: Store) -> None:
    await store.create_run(RunSpec("named", config={"policy": "writer"}))
    both = [Metric(1, "loss", 3.0, policy="writer"), Metric(1, "loss", 5.0, policy="judge")]
    await store.record_metrics("named", both)
    await store.record_metrics("named", [Metric(1, "loss", 4.0, policy="writer")])
    found = [metric for _, metric in await store.read(queries.list_metrics, "named", after=0, limit=100)]
    assert [(metric.policy, metric.value) for metric in found] == [("judge", 5.0), ("writer", 4.0)]
    series = await store.read(views.read_series, "named", SeriesQuery(100, "loss"))
    assert series["loss"].values == (4.0,)


async def test_a_span_is_kept_once(store: Store) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    span = Span("a" * 32, "b" * 16, None, "tool", "internal", 1, 2, "error", "boom", {"x": [1, "two"]})
    assert await store.record_spans("r", attempt, [span]) == 1
    assert await store.record_spans("r", attempt, [span]) == 0
    assert (await store.read(queries.get_episode, "r", attempt)).spans == (span,)


async def test_credits_of_a_step_are_kept_by_call_and_policy_and_a_repeated_step_overwrites_them(store: Store) -> None:
    await queue(store, "g", 2)
    attempt, other = await lease(store, 2)
    await store.record_calls("r", attempt, [Call(name, completion_ids=(1, 2)) for name in ("z", "a")])
    await store.finish("r", attempt, DONE)
    trained = CallCredit(attempt, "z", 1.0, 0.5, 0.25, 2)
    left = CallCredit(attempt, "a", excluded="role not selected \0")
    assert await store.record_credits("r", StepCredits(7, (trained, left))) == 2
    again = CallCredit(attempt, "z", 1.0, -0.5, 0.25, 2)
    await store.record_credits("r", StepCredits(7, (again,)))
    await store.record_credits("r", StepCredits(3, (CallCredit(attempt, "a", 0.0, 0.0, 0.5, 0, "no"),), "judge"))
    found = await store.read(queries.rollout_credits, "r", "g.0")
    assert found == [
        StepCredits(3, (CallCredit(attempt, "a", 0.0, 0.0, 0.5, 0, "no"),), "judge"),
        StepCredits(7, (again, left)),  # in the order of the calls
    ]
    assert await store.read(queries.rollout_credits, "r", "g.1") == []
    with pytest.raises(NotFound, match="no attempt"):
        await store.record_credits("r", StepCredits(7, (CallCredit(other, "c"), CallCredit("absent", "c"))))
    assert await store.read(queries.rollout_credits, "r", "g.1") == []  # all or nothing
    await store.delete_run("r")
    assert await store.read(lambda c: c.scalar(text("SELECT count(*) FROM credits"))) == 0


async def test_the_log_can_be_followed_without_missing_anything(store: Store) -> None:
    seen: list[str] = []

    async def follow() -> None:
        cursor = 0
        while "group.finished" not in seen:
            log = await store.events("r", EventCursor(after=cursor, wait=30, limit=2))
            seen.extend(event.kind for event in log.events)
            cursor = log.after

    following = asyncio.create_task(follow())
    await queue(store, "g", 2)
    for attempt in await lease(store, 2):
        await store.finish("r", attempt, DONE)
    await asyncio.wait_for(following, 30)
    assert seen == await kinds(store)


async def test_metrics_and_versions_are_kept_in_order(store: Store) -> None:
    await store.record_metrics("r", [Metric(0, "reward", 0.25), Metric(1, "reward", 0.5)])
    found = await store.read(queries.list_metrics, "r", after=0, limit=10)
    assert [(metric.step, metric.value) for _, metric in found] == [(0, 0.25), (1, 0.5)]
    assert await store.read(queries.list_metrics, "r", after=found[-1][0], limit=10) == []
    for number in (0, 1, 1):
        await store.publish_version("r", Version("policy", number))
    assert await store.read(queries.latest_versions, "r") == [Version("policy", 1)]


async def test_the_summary_counts_calls_of_live_and_ended_attempts(store: Store) -> None:
    await queue(store, "g", 3)
    ended, alive, _ = await lease(store, 3)
    for attempt in (ended, alive):
        await store.record_calls("r", attempt, [Call("c", completion_ids=(1, 2, 3))])
    await store.finish("r", ended, DONE)
    summary = await store.read(queries.summarise_run, "r")
    assert summary.rollouts == {"succeeded": 1, "running": 2}
    assert (summary.calls, summary.tokens, summary.mean_reward) == (2, 6, 1.0)


async def test_leases_get_their_whole_length_after_a_restart(store: Store) -> None:
    await queue(store, "g")
    (attempt,) = await lease(store)
    advance(store, 3600)
    await store.start()
    assert await store.expire_leases() == 0
    assert (await store.finish("r", attempt, DONE)).counted


async def test_deleting_a_run_leaves_the_others(store: Store) -> None:
    await store.create_run(RunSpec("other"))
    await store.enqueue("other", GroupSpec("o", Task("t", {})))
    await queue(store, "g", 5)
    attempt = (await store.lease(LeaseRequest("w", 3, run="r")))[0].attempt.id
    await store.record_calls("r", attempt, [Call("c", completion_ids=(1,))])
    await store.delete_run("r")
    assert await store.read(queries.list_run_ids) == ["other"]
    with pytest.raises(NotFound):
        await store.finish("r", attempt, DONE)
    assert await lease(store) == ["o.0.1"]
    await store.create_run(RunSpec("r"))  # its name is free again
    assert await store.read(queries.list_rollouts, "r", RolloutPage(limit=10)) == []


async def test_event_numbers_are_not_given_again_after_a_run_is_deleted(store: Store) -> None:
    await queue(store, "g", 300)  # the last events of the log, in more than one batch
    for attempt in await lease(store, 100):
        await store.finish("r", attempt, DONE)
    last = (await store.read(views.newest_event)).seq
    seen: list[int] = []
    store.notifications.subscribe(lambda event: seen.append(event.seq))
    await store.delete_run("r")
    await store.create_run(RunSpec("r"))
    assert seen == list(range(last + 1, last + 1 + len(seen)))
    following = await store.events("r", EventCursor(after=last))  # as one who has read all events of the first run
    assert [event.kind for event in following.events] == ["run.deleted", "run.created"]
    assert (await store.events("r", EventCursor())).events == following.events


async def test_a_metric_that_replaces_the_last_one_is_new_to_a_reader(store: Store) -> None:
    await store.record_metrics("r", [Metric(1, "reward", 0.25), Metric(2, "reward", 0.5)])
    (*_, (last, _)) = await store.read(queries.list_metrics, "r", after=0, limit=10)
    await store.record_metrics("r", [Metric(2, "reward", 0.75)])
    new = await store.read(queries.list_metrics, "r", after=last, limit=10)
    assert [(metric.step, metric.value) for _, metric in new] == [(2, 0.75)]
    found = await store.read(queries.list_metrics, "r", after=0, limit=10)
    assert [(metric.step, metric.value) for _, metric in found] == [(1, 0.25), (2, 0.75)]


async def test_no_lease_expires_because_the_server_or_the_machine_stalled(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_expiry, "_TICK_S", 0.01)
    await store.create_run(RunSpec("short", RunSettings(lease_s=1, max_attempts=9)))
    await store.enqueue("short", GroupSpec("g", Task("t2", {}), 2))
    expiring = asyncio.create_task(store.expire_loop())
    try:
        await asyncio.sleep(0)
        first, _ = await store.lease(LeaseRequest("w", 2, run="short"))
        for step in (1000.0, -500.0, 86_400.0):  # a stall, a clock that is set back, and a suspended machine
            advance(store, step)
            await store.enqueue("short", GroupSpec(f"g{step:g}", Task("t2", {})))
            await store.lease(LeaseRequest("w2", run="short"))  # wakes the loop that ends leases
            await asyncio.sleep(0.1)
            alive = await store.heartbeat("w", [first.attempt.id])
            assert not alive.ended, step
        assert len(await store.read(queries.active_attempts)) == 5
        while await store.read(queries.active_attempts):  # time that passes while the server runs does count
            advance(store, 0.5)
            await asyncio.sleep(0.05)
        kinds = [e.kind for e in (await store.events("short", EventCursor())).events]
        assert kinds.count(EventKind.ATTEMPT_ENDED) == 5
    finally:
        expiring.cancel()
