"""An evaluation says what it waits for before its first rollout has ended."""

from leyden.config import read_config
from leyden.remote import Remote
from leyden.trainer.rollouts.collector import RolloutCollector
from leyden.trainer.rollouts.evaluation import evaluate
from leyden.wire import RunSpec


async def test_progress_is_reported_before_the_first_rollout_ends(remote: Remote) -> None:
    await remote.create_run(RunSpec("r"))
    config = read_config({"run": "r", "agent": "a", "tasks": "t"})
    seen: list[tuple[int, int]] = []
    measured, episodes = await evaluate(
        RolloutCollector(remote, "r"), "eval-0", [], config, lambda done, total: seen.append((done, total))
    )
    assert seen == [(0, 0)]
    assert (measured.reward, measured.change, episodes) == (None, None, [])
