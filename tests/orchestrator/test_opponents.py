"""Self-play: a role is played by earlier versions of a policy, one in each step, which are recorded and not trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from randomness import moments
from scripted_training import ScriptedBackend, ScriptedLearner, ScriptedRun
from smallepisodes import call, continuation, episode

from leyden.api.wire import GroupSpec
from leyden.config import read_config
from leyden.learner.protocol import PooledVersion, TrainerState
from leyden.orchestrator.algorithm.resolve import algorithms_of
from leyden.orchestrator.credit.own_rewards import ForeignRewards
from leyden.orchestrator.loop import Trainer
from leyden.orchestrator.opponents import Opponent
from leyden.orchestrator.pipeline import RunParts, build_pipeline
from leyden.outcomes import Ending
from leyden.records import Call, Reward


def policies(pool: str = "uniform", **more: Any) -> dict[str, Any]:
    return {"player": {}, "opponent": {"of": "player", "roles": ["opponent"], "pool": pool, **more}}


def both_play(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """Every second rollout succeeds; each policy makes a call."""
    calls = [call(f"{spec.id}.{index}.{name}", policy=name) for name in ("player", "opponent")]
    return float(index % 2), calls, Ending.SUCCEEDED


class SelfPlay(ScriptedRun):
    """A scripted run whose policy plays against earlier versions of itself."""

    def __init__(self, folder: Path, chosen: dict[str, Any], every: int = 1, **settings: Any) -> None:
        self.saved: dict[int, tuple[TrainerState, str]] = {}
        self.met: list[tuple[str, str]] = []
        """For each group, its name and the weights of the opponent."""
        super().__init__(folder, both_play, policies=chosen, checkpoints={"every": every}, **settings)

    async def train(self) -> TrainerState:
        """Train from the last checkpoint."""
        quiet: Any = type("Quiet", (), {"write": lambda self, entry: None})()
        player, opponent = ScriptedLearner(self.journal, self.saved), ScriptedLearner(quiet, self.saved)
        learners = {"player": player, "opponent": opponent}

        class Learners:
            def __getattr__(self, method: str) -> Any:
                return lambda policy, *given, **named: getattr(learners[policy], method)(policy, *given, **named)

        def script(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
            self.met.append((spec.id, opponent.digest))
            return both_play(spec, index)

        self.store.script = script
        states = {"player": await player.restore("player")}
        engines: Any = {
            "player": ScriptedBackend(self.journal, False, False),
            "opponent": ScriptedBackend(quiet, False, False),
        }
        store: Any = self.store
        learner: Any = Learners()
        parts = RunParts(store, engines, learner, (self.observer,))
        pipeline = build_pipeline(self.config, algorithms_of(self.config), self.tasks, parts, states, self._folder)
        return (await Trainer(self.config, pipeline, states).run(self.stop))["player"]


async def test_the_latest_version_plays_each_step_and_is_not_trained_on(tmp_path: Path) -> None:
    run = SelfPlay(tmp_path, policies("latest"), training={"steps": 3, "tasks_per_step": 1}, held_out=1)
    state = await run.train()
    weights = {step: digest for step, (_, digest) in run.saved.items()} | {0: "start"}
    trained = [(group, digest) for group, digest in run.met if group.startswith("train")]
    assert dict(trained) == {f"train-{step}": weights[step] for step in range(3)}
    assert {digest for group, digest in run.met if group.startswith("eval")} == {"start"}
    assert state.version == 3 and state.pools == {"opponent": (PooledVersion(3),)}
    assert not any("opponent" in entry for entry in run.journal if "accumulate" in entry)


async def test_each_version_is_published_as_one_of_the_policy_that_serves_it(tmp_path: Path) -> None:
    run = SelfPlay(tmp_path, policies("latest"), training={"steps": 3, "tasks_per_step": 1}, held_out=1)
    await run.train()
    assert run.store.versions == {"player": [1, 2, 3], "opponent": [1, 2, 0]}  # the last for the evaluation


@pytest.mark.parametrize("pool", ["uniform", "win_rate"])
async def test_a_run_that_is_killed_meets_the_versions_that_it_would_have_met(pool: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"training": {"steps": 4, "tasks_per_step": 1}, "held_out": 0}
    whole = SelfPlay(tmp_path / "whole", policies(pool, pool_size=3), **settings)
    expected = await whole.train()
    met = dict(whole.met)
    assert all(len({digest for name, digest in whole.met if name == group}) == 1 for group in met)
    for at in moments(len(whole.journal)):
        run = SelfPlay(tmp_path / str(at), policies(pool, pool_size=3), **settings)
        await run.kill(run.train(), at)
        assert (await run.train()).pools == expected.pools, at
        assert dict(run.met) == met, at


@pytest.mark.parametrize("stopped", [1, 2, 3])
async def test_a_run_that_was_stopped_plays_the_versions_of_one_that_was_not(stopped: int, tmp_path: Path) -> None:
    """The checkpoint that is saved because of Ctrl-C is no version of the pool."""
    settings: dict[str, Any] = {"training": {"steps": 6, "tasks_per_step": 1}, "every": 2}
    whole = SelfPlay(tmp_path / "whole", policies(), **settings)
    expected = await whole.train()
    run = SelfPlay(tmp_path / "stopped", policies(), **settings)
    run.journal.on_write = lambda: run.stop.set() if run.journal[-1] == f"report {stopped}" else None
    assert (await run.train()).step == stopped
    run.stop.clear()
    run.open()
    assert (await run.train()).pools == expected.pools
    assert dict(run.met) == dict(whole.met)


class Serving:
    """Takes note of the checkpoints that are served."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    async def publish_checkpoint(self, step: int) -> None:
        self.steps.append(step)


def opponent(pool: str, *versions: PooledVersion, size: int = 8, foreign: str = "") -> tuple[Opponent, list[int]]:
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "policies": policies(pool, pool_size=size)})
    serving: Any = Serving()
    return Opponent("opponent", config, serving, ForeignRewards(frozenset({foreign})), versions), serving.steps


async def test_versions_that_the_policy_wins_least_against_are_met_most(tmp_path: Path) -> None:
    pool = (PooledVersion(1, won=98, played=98), PooledVersion(2, won=0, played=98))
    for rule, least in (("win_rate", 190), ("uniform", 80)):
        found, served = opponent(rule, *pool)
        chosen = []
        for step in range(200):
            await found.begin_step(step)
            chosen.append(served[-1])
        assert least <= chosen.count(2) and (rule == "win_rate" or chosen.count(2) <= 120)


async def test_wins_are_counted_by_the_rewards_of_the_policy_in_training() -> None:
    found, _ = opponent("win_rate", foreign="theirs")
    episodes = [episode(n, float(n), [], Ending.SUCCEEDED, Reward("t", 5.0, name="theirs")) for n in (0, 1)]
    found.add_results([*episodes, episode(2, None, [], Ending.CANCELLED)])
    assert found.pool == (PooledVersion(0, won=1, played=2),)


def test_rollouts_that_begin_inside_another_are_no_games_against_the_version_that_is_served() -> None:
    found, _ = opponent("win_rate")
    begun = episode(0, 1.0, [call("a"), call("b")])
    found.add_results([begun, continuation(begun, 1, 0, 1.0, [call("c")])])
    assert found.pool == (PooledVersion(0, won=1, played=1),)


async def test_a_rollout_below_success_is_not_won_though_it_is_better_than_others() -> None:
    found, _ = opponent("win_rate")
    found.add_results([episode(n, n / 4, [], Ending.SUCCEEDED) for n in range(4)])
    assert found.pool == (PooledVersion(0, won=0, played=4),)


def test_the_pool_has_the_newest_versions() -> None:
    found, _ = opponent("uniform", size=2)
    for step in (1, 2, 2, 3):
        found.add_version(step)
    assert [one.step for one in found.pool] == [2, 3]
