"""An evaluation says what it waits for before its first rollout has ended, and why it cannot go on."""

import pytest

from leyden.api.client import Remote
from leyden.api.wire import GroupSpec, RunSpec
from leyden.config import read_config
from leyden.learner.errors import TrainingError
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.orchestrator.rollouts.evaluation import evaluate
from leyden.records import Purpose, Task


async def test_progress_is_reported_before_the_first_rollout_ends(remote: Remote) -> None:
    await remote.create_run(RunSpec("r"))
    config = read_config({"run": "r", "agent": "a", "tasks": "t"})
    seen: list[tuple[int, int]] = []
    measured, episodes = await evaluate(
        RolloutCollector(remote, "r"), "eval-0", [], config, lambda done, total: seen.append((done, total))
    )
    assert seen == [(0, 0)]
    assert (measured.reward, measured.change, episodes) == (None, None, [])


async def test_an_evaluation_that_goes_on_with_another_number_of_rollouts_says_what_to_set(remote: Remote) -> None:
    await remote.create_run(RunSpec("r"))
    task = Task("t", {})
    await remote.enqueue("r", GroupSpec("eval-2-t", task, 1, Purpose.EVAL, step=2))
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "evaluation": {"rollouts": 4}})
    with pytest.raises(TrainingError, match=r"size = 1, not 4\): set `tasks` and `evaluation\.rollouts` back"):
        await evaluate(RolloutCollector(remote, "r"), "eval-2", [task], config, step=2)
