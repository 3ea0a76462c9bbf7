"""What the pages read: lists, series and groups of failures, on every database."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from leyden.api.views import PointsQuery, RolloutQuery, SeriesQuery, TaskQuery
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.estimates import estimate
from leyden.outcomes import Ending, Outcome
from leyden.records import Call, Metric, Purpose, Reward, Task, Version
from leyden.store.read import rollout_search, views
from leyden.store.read.run_digest import digest_run
from leyden.store.read.task_listing import list_tasks
from leyden.store.store import Store


async def fill(store: Store) -> None:
    """Two steps of three rollouts: rewards 0, 0.5 and a failure, with 1, 2 and 3 tokens."""
    for step in (1, 2):
        await store.enqueue("r", GroupSpec(f"step-{step}-0", Task("t", {}), 3, Purpose.TRAIN, step=step))
        for index, leased in enumerate(await store.lease(LeaseRequest("w", 3, run="r"))):
            tokens = tuple(range(index + 1))
            role = "writer" if index else "checker"
            call = Call("c", role=role, completion_ids=tokens, logprobs=(0.0,) * len(tokens))
            await store.record_calls("r", leased.attempt.id, [call])
            report = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", index / 2),))
            if index == 2:
                report = FinishRequest(Outcome(Ending.AGENT_ERROR, f"line {step}: id deadbeef{step}0 is missing"))
            await store.finish("r", leased.attempt.id, report)


async def search(store: Store, **query: object) -> list[str]:
    found = await store.read(rollout_search.search_rollouts, "r", RolloutQuery(**query))
    assert found.total >= len(found.rollouts)
    return [rollout.id for rollout in found.rollouts]


async def test_rollouts_are_found_by_the_text_of_task_and_answer(store: Store) -> None:
    for name, question, answer in (("a", 'How "far"?', "Ten miles"), ("b", "Who? 100%", "a far cousin")):
        await store.enqueue("r", GroupSpec(name, Task(name, {"question": question}), 1))
        (leased,) = await store.lease(LeaseRequest("w", run="r"))
        await store.finish("r", leased.attempt.id, FinishRequest(Outcome(Ending.SUCCEEDED), result=answer))
    assert await search(store, text="FAR") == ["b.0", "a.0"]
    assert await search(store, text='how "far"') == ["a.0"]
    assert await search(store, text="0%") == ["b.0"] and await search(store, text="1%0") == []
    found = await store.read(rollout_search.search_rollouts, "r", RolloutQuery(text="miles"))
    assert (found.questions, found.answers) == ({"a": '{"question":"How \\"far\\"?"}'}, {"a.0": '"Ten miles"'})


async def test_rollouts_are_filtered_sorted_and_paged(store: Store) -> None:
    await fill(store)
    assert await search(store, step_from=2, step_to=2, sort="oldest") == ["step-2-0.0", "step-2-0.1", "step-2-0.2"]
    assert await search(store, ending="agent_error") == ["step-2-0.2", "step-1-0.2"]
    assert await search(store, role="checker") == ["step-2-0.0", "step-1-0.0"]
    assert await search(store, reward_from=0.25) == ["step-2-0.1", "step-1-0.1"]
    assert (await search(store, sort="-tokens"))[:2] == ["step-1-0.2", "step-2-0.2"]
    assert (await search(store, sort="outcome"))[:2] == ["step-2-0.2", "step-1-0.2"]  # agent_error before succeeded
    assert (await search(store, sort="-outcome"))[-2:] == ["step-2-0.2", "step-1-0.2"]
    lengths = [one.tokens for one in (await store.read(rollout_search.search_rollouts, "r", RolloutQuery())).rollouts]
    short = await search(store, tokens_to=min(lengths))
    assert (
        len(short)
        == lengths.count(min(lengths))
        < 6
        == len(short) + len(await search(store, tokens_from=min(lengths) + 1))
    )
    assert await search(store, sort="oldest", offset=1, limit=2) == ["step-1-0.1", "step-1-0.2"]
    assert (await store.read(rollout_search.search_rollouts, "r", RolloutQuery(limit=1))).total == 6


async def test_failures_that_differ_in_numbers_are_one_group(store: Store) -> None:
    await fill(store)
    found = await store.read(rollout_search.failures, "r")
    (group,) = found.groups
    assert (group.count, group.example, found.total) == (2, "step-2-0.2", 2)
    assert group.message == "line #: id # is missing"
    assert await search(store, message=group.message) == ["step-2-0.2", "step-1-0.2"]


async def test_a_message_of_many_failures_takes_no_more_variables_than_there_are_failures(tmp_path: Path) -> None:
    store = await Store(tmp_path / "leyden.db").start()
    await store.create_run(RunSpec("r"))
    await store.enqueue("r", GroupSpec("g", Task("t", {}), 60))
    await store.cancel_group("r", "g")
    with store.database.reader.begin() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 100)  # as 32,766 of most builds is for 20,000 failures
        query = RolloutQuery(message="group g was cancelled", limit=10)
        found = rollout_search.search_rollouts(connection, "r", query)
    assert (len(found.rollouts), found.total) == (10, 60)
    await store.close()


async def test_a_role_of_few_rollouts_is_found_without_reading_the_others(tmp_path: Path) -> None:
    store = await Store(tmp_path / "leyden.db").start()
    await store.create_run(RunSpec("r"))
    await store.enqueue("r", GroupSpec("g", Task("t", {}), 1000))
    (leased,) = await store.lease(LeaseRequest("w", run="r"))
    await store.record_calls("r", leased.attempt.id, [Call("c", role="checker")])
    instructions = 0

    def count() -> None:
        nonlocal instructions
        instructions += 1

    with store.database.reader.begin() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        driver.set_progress_handler(count, 1)
        found = rollout_search.search_rollouts(connection, "r", RolloutQuery(role="checker"))
        driver.set_progress_handler(None, 0)
    assert [rollout.id for rollout in found.rollouts] == [leased.attempt.rollout] and found.total == 1
    assert instructions < 1000
    await store.close()


async def test_a_long_series_is_thinned_to_means_with_their_range(store: Store) -> None:
    await store.record_metrics("r", [Metric(step, "loss", float(step)) for step in range(1000)])
    (series,) = (await store.read(views.read_series, "r", SeriesQuery(10, "lo*"))).values()
    assert len(series.steps) == 10
    assert (series.steps[0], series.values[0], series.low[0], series.high[0]) == (99, 49.5, 0.0, 99.0)
    (whole,) = (await store.read(views.read_series, "r", SeriesQuery(1000, "loss"))).values()
    assert whole.values == tuple(map(float, range(1000))) and not whole.low
    assert await store.read(views.read_series, "r", SeriesQuery(10, "absent")) == {}


async def test_a_range_of_a_series_has_all_its_points_with_their_times(store: Store) -> None:
    await store.record_metrics("r", [Metric(step, "loss", float(step), at=100.0 + step) for step in range(1000)])
    await store.record_metrics("r", [Metric(7, "rare", 1.0, at=5.0)])
    part = SeriesQuery(10, step_from=995, step_to=998)
    assert (await store.read(views.read_series, "r", part))["loss"].values == (995.0, 996.0, 997.0, 998.0)
    assert "rare" not in await store.read(views.read_series, "r", part)
    times = await store.read(views.read_step_times, "r", PointsQuery(10))
    assert (times.steps[0], times.values[0], times.steps[-1], times.values[-1]) == (99, 199.0, 999, 1099.0)
    times = await store.read(views.read_step_times, "r", PointsQuery(10, step_to=1))
    assert (times.steps, times.values) == ((0, 1), (100.0, 101.0))
    await fill(store)
    digest = await store.read(digest_run, "r")
    assert [one.step for one in digest.rewards(PointsQuery(1, step_from=2)).train] == [2]


async def test_a_card_has_the_reward_of_the_last_step_with_its_error(store: Store) -> None:
    await fill(store)
    card = await store.read(views.run_card, "r", 1000.0)
    assert (card.reward, card.held_out, card.rollouts) == (
        pytest.approx(1 / 6),
        False,
        {"succeeded": 4, "agent_error": 2},
    )
    assert card.error is None  # of one task: nothing is known of others
    assert card.tokens == 12
    await store.enqueue("r", GroupSpec("step-2-1", Task("u", {}), 1, Purpose.TRAIN, step=2))
    (leased,) = await store.lease(LeaseRequest("w", run="r"))
    await store.finish("r", leased.attempt.id, FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", 1.0),)))
    card, expected = await store.read(views.run_card, "r", 1000.0), estimate({"t": [0.0, 0.5, 0.0], "u": [1.0]})
    assert expected is not None and (card.reward, card.error) == pytest.approx((expected.mean, expected.error))


async def test_a_step_of_which_rollouts_still_run_is_not_the_best(store: Store) -> None:
    await fill(store)
    await store.enqueue("r", GroupSpec("step-3-0", Task("t", {}), 2, Purpose.TRAIN, step=3))
    done = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", 1.0),))
    found = []
    for leased in await store.lease(LeaseRequest("w", 2, run="r")):
        await store.finish("r", leased.attempt.id, done)
        card = await store.read(views.run_card, "r", 1000.0)
        found.append((card.reward, card.best_step))
    assert found == [(1.0, 2), (1.0, 3)]


async def test_a_run_of_dev_is_judged_by_all_its_rollouts_and_is_finished(store: Store) -> None:
    rewards = {"t": [0.0, 1.0], "u": [1.0, 1.0]}
    for task, given in rewards.items():
        await store.enqueue("r", GroupSpec(f"dev-{task}", Task(task, {}), 2, Purpose.DEV))
        for reward, leased in zip(given, await store.lease(LeaseRequest("w", 2, run="r")), strict=True):
            done = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", reward),))
            await store.finish("r", leased.attempt.id, done)
    card, expected = await store.read(views.run_card, "r", 1000.0), estimate(rewards)
    assert expected is not None and (card.reward, card.error) == pytest.approx((expected.mean, expected.error))
    assert (card.counted, card.measured, card.held_out, card.state) == (4, "dev", False, "finished")
    assert (card.best, card.steps) == (None, None)


async def test_a_training_that_ended_without_an_update_is_unchanged(store: Store) -> None:
    await store.create_run(RunSpec("still", config={"training": {"steps": 2}}))

    async def state() -> str:
        return (await store.read(views.run_card, "still", 1000.0)).state

    await store.record_metrics("still", [Metric(1, "reward/mean", 1.0)])
    assert await state() != "unchanged"  # it has not ended
    await store.record_metrics("still", [Metric(2, "reward/mean", 1.0)])
    await store.publish_version("still", Version("policy", 0))
    assert await state() == "unchanged"
    await store.publish_version("still", Version("policy", 1))
    assert await state() == "finished"


async def test_the_document_of_a_run_that_a_program_created_may_be_any(store: Store) -> None:
    sections: dict[str, Any] = {"training": {"steps": "many"}, "policies": ["a", "b"], "policy": 1, "model": 2}
    for run, config in (("odd", sections), ("odder", {"training": True, "evaluation": 3}), ("oddest", [sections])):
        await store.create_run(RunSpec(run, config=config))
        card = await store.read(views.run_card, run, 1000.0)
        assert (card.steps, card.model, card.policies) == (None, None, {"policy": 0})
        assert not await store.read(views.has_policies, run)
        assert (await store.read(list_tasks, run, TaskQuery())).total == 0


async def test_rewards_of_many_steps_are_joined_into_points(store: Store) -> None:
    await fill(store)
    digest = await store.read(digest_run, "r")
    assert [(one.step, one.count) for one in digest.rewards(PointsQuery(300)).train] == [(1, 3), (2, 3)]
    (joined,) = digest.rewards(PointsQuery(1)).train
    assert (joined.step, joined.count, joined.mean) == (2, 6, pytest.approx(1 / 6))
    assert joined.deviation == pytest.approx((1 / 15) ** 0.5)
    assert (digest.states, digest.purposes, digest.last_step) == ({"succeeded": 4, "agent_error": 2}, {"train": 6}, 2)
    facets = await store.read(rollout_search.facets, "r", digest)
    assert facets.roles == ("checker", "writer")


@pytest.mark.parametrize("step", [3, None])  # of a training, and of `leyden eval`
async def test_an_evaluation_has_an_error_clustered_by_task_and_no_test_tasks(store: Store, step: int | None) -> None:
    rewards = {"t": [0.0, 1.0], "u": [1.0, 1.0]}
    for task, given in rewards.items():
        await store.enqueue("r", GroupSpec(f"eval-{task}", Task(task, {}), 2, Purpose.EVAL, step=step))
        for reward, leased in zip(given, await store.lease(LeaseRequest("w", 2, run="r")), strict=True):
            done = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", reward),))
            await store.finish("r", leased.attempt.id, done)
    await store.enqueue("r", GroupSpec("test-t", Task("t", {}), 1, Purpose.TEST, step=step))
    (leased,) = await store.lease(LeaseRequest("w", run="r"))
    await store.finish("r", leased.attempt.id, FinishRequest(Outcome(Ending.AGENT_ERROR)))
    card, expected = await store.read(views.run_card, "r", 1000.0), estimate(rewards)
    assert expected is not None and (card.reward, card.error) == pytest.approx((expected.mean, expected.error))
    assert (card.counted, card.held_out) == (4, True)
    assert (card.state == "finished", card.best_step) == ((True, None) if step is None else (False, 3))
    (point,) = (await store.read(digest_run, "r")).rewards(PointsQuery(10)).held_out
    assert (point.mean, point.error) == (card.reward, card.error)


async def test_metrics_and_versions_are_read_by_policy(store: Store) -> None:
    policies: dict[str, Any] = {
        "judge": {"upstream": True},
        "old": {"trained": False},
        "new": {},
        "newer": {},
        "rival": {"of": "new"},
    }
    configs: dict[str, Any] = {
        "one": {"policy": "writer", "policies": {}},
        "several": {"policy": "policy", "policies": policies},
        "none": None,
    }
    for run, config in configs.items():
        await store.create_run(RunSpec(run, config=config))
        configs[run] = await store.read(views.trained_policies, run), await store.read(views.has_policies, run)
    assert configs == {"one": (["writer"], False), "several": (["new", "newer"], True), "none": (["policy"], False)}
    await store.publish_version("several", Version("newer", 3))
    assert (await store.read(views.run_card, "several", 0.0)).policies == {"new": 0, "newer": 3}
    assert await store.read(views.versions_at, "several", 0.0) == {}
    found = [Metric(1, "reward/mean", value, 1.0, policy) for policy, value in (("new", 0.1), ("newer", 0.2))]
    await store.record_metrics("several", found)
    for policy, value in (("", 0.1), ("new", 0.1), ("newer", 0.2)):
        series = await store.read(views.read_series, "several", SeriesQuery(policy=policy))
        assert series["reward/mean"].values == (value,)
