"""A group that is scored together is finished when it is scored, once, whatever becomes of those who score it."""

import asyncio

import pytest
from msgspec.structs import replace
from sqlalchemy import text

from leyden.api.wire import (
    EventCursor,
    FinishRequest,
    GroupScoring,
    GroupSpec,
    LeaseRequest,
    RolloutPage,
    RunSpec,
    Scores,
    ScoringHeartbeat,
)
from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome
from leyden.records import Reward, RewardKind, Task
from leyden.store.errors import Conflict, NotFound
from leyden.store.read import queries
from leyden.store.store import Store

LATER = FinishRequest(Outcome(Ending.SUCCEEDED), "said", awaits_group=True)
FAILED = FinishRequest(Outcome(Ending.AGENT_ERROR, "it fell"))


async def run_group(store: Store, *reports: FinishRequest) -> None:
    """Bring a group `g` to the end of its last rollout."""
    await store.enqueue("r", GroupSpec("g", Task("t", {}), len(reports)))
    grants = await store.lease(LeaseRequest("w", len(reports), run="r"))
    for grant, report in zip(grants, reports, strict=True):
        await store.finish("r", grant.attempt.id, report)


async def lease(store: Store, worker: str = "w") -> GroupScoring:
    found = await store.lease_scoring(worker, "r")
    assert found is not None
    return found


async def endings(store: Store) -> list[str]:
    rollouts = await store.read(queries.list_rollouts, "r", RolloutPage(limit=100))
    episodes = await store.read(queries.group_episodes, "r", "g")
    assert [r.outcome for r in rollouts] == [e.attempt.outcome for e in episodes]
    return [str(r.outcome.ending) for r in rollouts if r.outcome]


async def episodes(store: Store) -> list[Episode]:
    return await store.read(queries.group_episodes, "r", "g")


async def finished(store: Store) -> bool:
    group = await store.read(queries.get_group, "r", "g")
    log = (await store.events("r", EventCursor(kind="group.finished"))).events
    assert len(log) == (group.finished is not None)
    return group.finished is not None


async def test_the_parts_of_a_reward_count_with_their_weights(store: Store) -> None:
    await run_group(store, LATER, LATER)
    await lease(store)
    given = {"g.0": {"correct": 1.0, "format": 0.5}, "g.1": 2.0}
    await store.score("r", "g", Scores(1, given, weights={"format": 0.1}))
    found = await episodes(store)
    assert [episode.final_reward(0.0) for episode in found] == [1.05, 2.0]
    assert [episode.reward_parts for episode in found] == [{"correct": 1.0, "format": 0.5}, {}]


async def test_a_group_is_finished_when_it_is_scored(store: Store) -> None:
    await run_group(store, LATER, FAILED, LATER)
    assert not await finished(store)
    assert (await store.read(queries.summarise_run, "r")).groups_unscored == 1
    assert [episode.final_reward(-1.0) for episode in await episodes(store)] == [None, -1.0, None]
    scoring = await lease(store)
    assert (scoring.group.id, scoring.group.size, scoring.number, scoring.lease_s) == ("g", 3, 1, 60)
    assert await store.lease_scoring("v", None) is None  # it is leased to one
    assert (await store.score("r", "g", Scores(1, {"g.0": 0.25, "g.2": 0.75}))).counted
    assert await finished(store)
    assert [episode.final_reward(-1.0) for episode in await episodes(store)] == [0.25, -1.0, 0.75]
    assert await endings(store) == ["succeeded", "agent_error", "succeeded"]
    summary = await store.read(queries.summarise_run, "r")
    assert (summary.mean_reward, summary.groups_unscored) == (
        pytest.approx(1 / 3),
        0,
    )  # the failed one has the failure reward, 0
    assert not (await store.score("r", "g", Scores(1, {"g.0": 1.0}))).counted  # said again, it changes nothing
    assert [episode.final_reward(0.0) for episode in await episodes(store)] == [0.25, 0.0, 0.75]


async def test_a_group_without_rollouts_to_score_is_finished_at_once(store: Store) -> None:
    await run_group(store, FAILED, FAILED)
    assert await finished(store)
    assert await store.lease_scoring("w", "r") is None


async def test_rollouts_that_get_no_score_end_without_a_reward(store: Store) -> None:
    await run_group(store, LATER, LATER, LATER)
    scoring = await lease(store)
    with pytest.raises(NotFound, match=r"g\.7"):
        await store.score("r", "g", Scores(scoring.number, {"g.7": 1.0}))
    await store.score("r", "g", Scores(scoring.number, {"g.0": 1.0, "g.1": None}, "the judge was undecided"))
    assert await finished(store)
    assert await endings(store) == ["succeeded", "no_reward", "no_reward"]
    assert [e.attempt.outcome and e.attempt.outcome.message for e in await episodes(store)][1:] == [
        "the judge was undecided"
    ] * 2
    assert [e.attempt.result for e in await episodes(store)] == ["said"] * 3


async def test_a_scoring_whose_worker_dies_goes_to_another_and_in_the_end_is_given_up(store: Store) -> None:
    await run_group(store, LATER)
    first = await lease(store, "w1")
    store.clock.now += 40
    assert (await store.heartbeat_scoring("r", "g", ScoringHeartbeat(first.number))).counted
    store.clock.now += 40
    assert await store.expire_leases() == 0
    store.clock.now += 30
    assert await store.expire_leases() == 1
    second = await lease(store, "w2")
    assert not (await store.heartbeat_scoring("r", "g", ScoringHeartbeat(first.number))).counted
    assert not (await store.score("r", "g", Scores(first.number, {"g.0": 1.0}))).counted
    assert not await finished(store)
    store.clock.now += 61
    assert await store.expire_leases() == 1
    assert not (await store.score("r", "g", Scores(second.number, {"g.0": 1.0}))).counted
    assert await finished(store)
    (episode,) = await episodes(store)
    assert episode.attempt.outcome == Outcome(
        Ending.NO_REWARD, "2 workers were lost while they scored its group; the last was w2"
    )


async def test_a_scoring_that_is_given_back_or_released_is_not_held_against_it(store: Store) -> None:
    await run_group(store, LATER)
    for _ in range(5):
        scoring = await lease(store)
        assert (await store.score("r", "g", Scores(scoring.number, given_back=True))).counted
    await lease(store)
    await store.release_all("gone")
    assert (await lease(store)).number == 7


async def test_a_restart_of_the_server_gives_a_scoring_its_whole_lease(store: Store) -> None:
    await run_group(store, LATER)
    scoring = await lease(store)
    store.clock.now += 3600
    await store.start()
    assert await store.expire_leases() == 0
    assert (await store.score("r", "g", Scores(scoring.number, {"g.0": 1.0}))).counted


async def test_a_scorer_waits_until_a_group_is_there(store: Store) -> None:
    for run in (None, "r"):
        waiting = asyncio.create_task(store.lease_scoring("w", run, wait=30))
        await run_group(store, LATER) if run is None else await store.score("r", "g", Scores(1, given_back=True))
        found = await asyncio.wait_for(waiting, 30)
        assert found and found.group.id == "g"
    await store.create_run(RunSpec("other"))
    assert await store.lease_scoring("w", "other") is None


async def test_a_scorer_that_hangs_up_leaves_the_group_to_others(store: Store) -> None:
    waiting = asyncio.create_task(store.lease_scoring("gone", "r", wait=30))
    await asyncio.sleep(0)
    await run_group(store, LATER)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await asyncio.wait_for(store.lease_scoring("w", "r", wait=30), 30)


async def test_cancelling_gives_up_the_scoring(store: Store) -> None:
    await store.enqueue("r", GroupSpec("g", Task("t", {}), 2))
    one, _ = await store.lease(LeaseRequest("w", 2, run="r"))
    await store.finish("r", one.attempt.id, LATER)
    assert await store.cancel_group("r", "g") == 1
    assert await finished(store)
    assert await endings(store) == ["no_reward", "cancelled"]
    assert await store.lease_scoring("w", "r") is None


async def test_a_run_has_one_source_of_rewards_here_too(store: Store) -> None:
    await store.enqueue("r", GroupSpec("g", Task("t", {})))
    (grant,) = await store.lease(LeaseRequest("w", run="r"))
    await store.record_rewards("r", grant.attempt.id, [Reward("own", 1.0)])
    with pytest.raises(Conflict, match="one source"):
        await store.finish("r", grant.attempt.id, LATER)


@pytest.mark.parametrize("id", ["final", "group"])
async def test_no_step_reward_takes_the_id_of_a_final_reward(store: Store, id: str) -> None:
    await store.enqueue("r", GroupSpec("g", Task("t", {})))
    (grant,) = await store.lease(LeaseRequest("w", run="r"))
    step = Reward(id, 0.5, RewardKind.STEP)
    with pytest.raises(Conflict, match="another"):
        await store.record_rewards("r", grant.attempt.id, [step])
    with pytest.raises(Conflict, match="another"):
        await store.finish("r", grant.attempt.id, replace(LATER, rewards=(step,)))
    await store.finish("r", grant.attempt.id, LATER)
    await lease(store)
    assert (await store.score("r", "g", Scores(1, {"g.0": 0.25}))).counted


async def test_a_run_that_is_deleted_takes_its_scorings_with_it(store: Store) -> None:
    await run_group(store, LATER)
    await store.delete_run("r")
    assert await store.read(lambda c: c.scalar(text("SELECT count(*) FROM scorings"))) == 0


async def test_a_reward_that_comes_later_makes_a_success_of_a_rollout_without_one(store: Store) -> None:
    await run_group(
        store, FinishRequest(Outcome(Ending.SUCCEEDED)), FinishRequest(Outcome(Ending.NO_REWARD, "the grader is ill"))
    )
    assert await endings(store) == ["no_reward", "no_reward"]
    await store.record_rewards("r", "g.1.1", [Reward("x", 0.5, source="rescore f")], rescoring=True)
    assert await endings(store) == ["no_reward", "succeeded"]
    assert (await store.read(queries.summarise_run, "r")).rollouts == {"no_reward": 1, "succeeded": 1}
    episode = (await episodes(store))[1]
    assert (episode.final_reward(0.0), episode.attempt.outcome) == (0.5, Outcome(Ending.SUCCEEDED))
