"""The list of tasks by success rate, on every database."""

from leyden.api.views import ListedTask, TaskQuery
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.outcomes import Ending, Outcome
from leyden.records import Purpose, Reward, Task
from leyden.store.read.task_listing import list_tasks
from leyden.store.store import Store


async def group(store: Store, run: str, name: str, task: str, step: int, *rewards: float | None) -> None:
    await store.enqueue(run, GroupSpec(name, Task(task, {"question": f"what is {task}?"}), len(rewards), step=step))
    leased = await store.lease(LeaseRequest("w", len(rewards), run=run))
    for one, reward in zip(leased, rewards, strict=True):
        given = () if reward is None else (Reward("f", reward),)
        ending = Ending.NO_REWARD if reward is None else Ending.SUCCEEDED
        await store.finish(run, one.attempt.id, FinishRequest(Outcome(ending), rewards=given))


async def test_tasks_have_success_rate_mean_reward_and_share_of_flat_groups(store: Store) -> None:
    await group(store, "r", "a1", "a", 1, 1.0, 0.0)
    await group(store, "r", "a2", "a", 3, 1.0, 1.0)
    await group(store, "r", "b1", "b", 2, 0.0, None)
    await group(store, "r", "c1", "c", 2, None, None)
    await store.enqueue("r", GroupSpec("a0", Task("a", {"question": "what is a?"}), 3, Purpose.EVAL, step=0))
    found = await store.read(list_tasks, "r", TaskQuery(purpose=Purpose.TRAIN))
    assert found.total == 3 and found.tasks == (
        ListedTask("b", "train", 1, 2, 0.0, 0.0, None, 2, '{"question":"what is b?"}'),
        ListedTask("a", "train", 2, 4, 0.75, 0.75, 0.5, 3, '{"question":"what is a?"}'),
        ListedTask("c", "train", 1, 2, None, None, None, 2, '{"question":"what is c?"}'),
    )
    every = await store.read(list_tasks, "r", TaskQuery(sort="-step", offset=1, limit=2))
    assert (every.total, [task.id for task in every.tasks]) == (4, ["b", "c"])
    assert all(isinstance(one.rollouts, int) for one in every.tasks)
    assert (await store.read(list_tasks, "r", TaskQuery(offset=9))).total == 4


async def test_success_is_what_the_configuration_of_the_run_says(store: Store) -> None:
    await store.create_run(RunSpec("half", config={"evaluation": {"success": 0.5}}))
    await group(store, "half", "h1", "a", 1, 0.6, 0.1)
    (task,) = (await store.read(list_tasks, "half", TaskQuery())).tasks
    assert task.success == 0.5
