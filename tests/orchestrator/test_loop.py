"""The training loop with a scripted server, engine and learner: the order of events, and what outlives a crash."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from randomness import moments
from scripted_training import ScriptedRun, one_call
from smallepisodes import call

from leyden.api.wire import GroupSpec
from leyden.backoff import Backoff
from leyden.learner.errors import TrainingError
from leyden.learner.protocol import Update, UpdateMetrics
from leyden.outcomes import Ending
from leyden.records import Call, Purpose


def first_words(journal: Sequence[str]) -> list[str]:
    return [entry.partition(" ")[0] for entry in journal]


@pytest.mark.parametrize("shares_parameters", [False, True], ids=["own copy", "shared"])
async def test_a_step_collects_evaluates_records_and_updates_and_publishes_once(
    tmp_path: Path, shares_parameters: bool
) -> None:
    run = ScriptedRun(tmp_path, shares_parameters=shares_parameters, training={"steps": 1, "updates_per_step": 2})
    state = await run.start()
    held = ["hold"] if shares_parameters else []  # an engine with its own copy serves calls until it gets the weights
    assert run.journal == [
        *("start 1", "sample train-0", "sample train-1", "logprobs 4", "divergence"),
        *("evaluate 2", "logprobs 2", "evaluate 2", "logprobs 2", "credits 1"),
        *("accumulate train-0.0:-0.71 train-0.1:+0.71", *held, "change to 1", "apply", "changed"),
        *("accumulate train-1.0:-0.71 train-1.1:+0.71", *held, "change to 2", "apply", "changed"),
        *("hold", "publish 2", "version 2", "report 1", "copy 1", "save 1"),
    ]
    assert (state.step, state.position, state.version) == (1, 2, 2)


async def test_an_engine_that_does_not_fit_sleeps_until_it_gets_the_weights(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, sleeps=True, training={"steps": 1})
    await run.start()
    words = first_words(run.journal)
    assert words[: words.index("evaluate")] == ["start", "sample", "sample", "hold", "sleep", "logprobs", "divergence"]
    assert words[words.index("changed") :] == [
        "changed",
        "free",
        "hold",
        "publish",
        "version",
        "report",
        "copy",
        "save",
    ]


def equal_rewards(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    return 1.0, [call(f"{spec.id}.{index}")], Ending.SUCCEEDED


@pytest.mark.parametrize("sleeps", [False, True])
async def test_a_step_without_an_update_only_wakes_the_engine(tmp_path: Path, sleeps: bool) -> None:
    run = ScriptedRun(tmp_path, equal_rewards, sleeps=sleeps, training={"steps": 2})
    state = await run.start()
    assert (state.step, state.version) == (2, 0) and run.store.versions["policy"] == ([0, 0] if sleeps else [])
    assert "accumulate" not in first_words(run.journal) and list(map(len, run.store.credits.values())) == [2, 2]


async def test_evaluations_come_before_the_first_step_and_when_they_are_due_and_choose_the_best(tmp_path: Path) -> None:
    def script(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        held_out = {"eval-0": 0.2, "eval-2": 0.7, "eval-3": 0.4, "test-2": 0.6}
        return held_out.get(spec.id[:6], float(index % 2)), [call(f"{spec.id}.{index}")], Ending.SUCCEEDED

    evaluation = {"every": 2, "rollouts": 1}
    run = ScriptedRun(tmp_path, script, held_out=2, test=1, training={"steps": 3}, evaluation=evaluation)
    state = await run.start()
    assert (state.step, state.version, state.best_step, state.best_reward) == (3, 3, 2, 0.7)
    shown = [entry for entry in run.journal if entry.split()[0] in ("measured", "report", "save", "load", "tested")]
    assert shown == [
        *("measured 0", "report 1", "measured 2", "report 2", "save 2", "measured 3", "report 3", "save 3"),
        *("load 2", "tested 2"),
    ]
    assert run.store.versions["policy"] == [1, 2, 3, 2]  # the test is of the best weights
    assert run.learner.digest == run.checkpoints[2][1]


async def test_the_model_before_training_is_tested_if_no_step_is_better(tmp_path: Path) -> None:
    def script(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        held_out = {"eval-0": 0.7, "eval-1": 0.5, "test-0": 0.6}
        return held_out.get(spec.id[:6], float(index % 2)), [call(f"{spec.id}.{index}")], Ending.SUCCEEDED

    run = ScriptedRun(tmp_path, script, held_out=2, test=1, training={"steps": 1}, evaluation={"rollouts": 1})
    state = await run.start()
    assert (state.step, state.best_step, state.best_reward) == (1, 0, 0.7)
    assert run.journal[-1] == "tested 0" and run.store.versions["policy"] == [1, 0] and run.learner.digest == "start"


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_evaluations_go_before_the_rollouts_to_train_on_that_run_beside_them(
    tmp_path: Path, max_staleness: int
) -> None:
    run = ScriptedRun(tmp_path, held_out=1, training={"max_staleness": max_staleness}, evaluation={"every": 1})
    await run.start()
    asked = {(spec.purpose, spec.priority) for spec in run.store.requested}
    assert asked == {(Purpose.TRAIN, 0), (Purpose.EVAL, 10 if max_staleness else 0)}


def some_fail(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """The second and the third group have too few rollouts that count."""
    if spec.id in ("train-1", "train-2"):
        return None, [], Ending.LOST
    return float(index % 2), [call(f"{spec.id}.{index}")], Ending.SUCCEEDED


async def test_groups_take_the_next_position_in_the_place_of_dropped_ones(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, some_fail, training={"steps": 2, "min_group": 2})
    state = await run.start()
    assert list(run.store.sampled) == [f"train-{number}" for number in range(6)]
    trained = [entry for entry in run.journal if entry.startswith("accumulate")]
    assert [entry.count("train-") for entry in trained] == [4, 4] and "train-3.1" in trained[0]
    assert state.position == 6
    asked = {spec.id: spec.step for spec in run.store.requested}
    assert [asked[f"train-{number}"] for number in range(6)] == [1, 1, 1, 1, 2, 2]  # the step they are meant for
    assert {episode.rollout.group for episode in run.store.sampled["train-4"]} == {"train-4"}


async def test_a_step_goes_on_without_groups_that_are_dropped_again_and_again(tmp_path: Path) -> None:
    def only_the_first(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        kept = spec.id == "train-0"
        return (float(index), [call(f"{index}")], Ending.SUCCEEDED) if kept else (None, [], Ending.LOST)

    run = ScriptedRun(tmp_path, only_the_first, training={"steps": 1, "max_refill": 1})
    state = await run.start()
    assert state.position == 2 + 1 + 1 and run.observer.reports[0].accounting.groups_dropped == 3


async def test_a_run_with_nothing_to_learn_from_records_why_and_ends_with_advice(tmp_path: Path) -> None:
    def other_role(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        return 1.0, [call("a", role="writer")], Ending.SUCCEEDED

    run = ScriptedRun(tmp_path, other_role, training={"roles": ["critic"]})
    with pytest.raises(TrainingError, match=r"step 1: 6 groups had too few rollouts.*calls had the roles writer"):
        await run.start()
    assert len(run.store.credits[1]) == 6 and "evaluate" not in first_words(run.journal)


async def test_a_stop_finishes_the_step_and_saves(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, training={"steps": 9})

    def stop_in_step_two(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        if spec.step == 2:
            run.stop.set()
        return float(index % 2), [call(f"{spec.id}.{index}")], Ending.SUCCEEDED

    run.store.script = stop_in_step_two
    state = await run.start()
    assert state.step == 2 and run.journal[-3:] == ["report 2", "copy 2", "save 2"]


async def test_a_stop_abandons_the_evaluation_before_the_first_step(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, held_out=1)
    waiting = asyncio.Event()

    async def never(*_: object) -> None:
        waiting.set()
        await asyncio.Event().wait()

    run.store.enqueue = never
    training = asyncio.create_task(run.start())
    await waiting.wait()
    run.stop.set()
    assert (await training).step == 0 and run.journal == []


async def test_the_time_limit_ends_a_run_after_the_step_in_which_it_is_over(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, held_out=1, training={"steps": 9, "time_limit_s": 1e-6})
    state = await run.start()
    assert state.step == 1 and run.journal[-4:] == ["measured 1", "report 1", "copy 1", "save 1"]


async def test_a_full_disk_delays_what_is_written_and_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.orchestrator.disk_room._BACKOFF", Backoff(0.0, 0.0))
    run = ScriptedRun(tmp_path, training={"steps": 1})
    run.learner.full_disks = run.observer.full_disks = 3
    await run.start()
    assert run.journal[-3:] == ["report 1", "copy 1", "save 1"]
    full = "([Errno 28] No space left on device): waiting for room"
    assert run.observer.warnings == [
        f"the metrics of step 1 cannot be written {full}",
        f"the checkpoint of step 1 cannot be written {full}",
    ]


def make(folder: Path) -> ScriptedRun:
    """A run with everything: retries, evaluations, several updates, epochs, an engine that shares the parameters."""
    return ScriptedRun(
        folder,
        some_fail,
        shares_parameters=True,
        held_out=1,
        test=1,
        training={"steps": 2, "min_group": 2, "updates_per_step": 2, "epochs": 2},
        evaluation={"every": 1, "rollouts": 1},
        checkpoints={"every": 1},
    )


def computed(run: ScriptedRun) -> list[str]:
    """What the learner was asked for. The start is measured from calls that are kept, so not again after step 1."""
    words = ("accumulate", "apply", "copy", "load")
    return [entry for entry in run.journal if entry.startswith(words)]


async def test_a_run_that_is_killed_anywhere_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    expected = await whole.start()
    for point in moments(len(whole.journal)):
        run = make(tmp_path / str(point))
        await run.kill(run.start(), point)
        saved = max(run.checkpoints, default=0)
        sampled = dict(run.store.sampled)
        assert await run.start() == expected, whole.journal[point]
        assert run.learner.digest == whole.learner.digest
        after = computed(whole)[computed(whole).index(f"copy {saved}") + 1 :] if saved else computed(whole)
        assert computed(run) == after
        assert run.store.sampled.keys() == whole.store.sampled.keys()
        assert all(run.store.sampled[name] is episodes for name, episodes in sampled.items())  # none is sampled again


async def test_a_run_that_was_trained_further_goes_on_where_it_ended(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, training={"steps": 1})
    await run.start()
    run.open()
    run.with_settings(steps=2)
    state = await run.start()
    assert (state.step, state.position, state.version) == (2, 4, 2)
    assert run.journal[:3] == ["start 2", "sample train-2", "sample train-3"]


async def test_quick_failures_of_a_step_do_not_end_a_run_whose_other_tasks_succeed(tmp_path: Path) -> None:
    """Tasks that fail at once finish first; they are counted with those that were requested with them."""

    def half_fail(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        ending = Ending.LOST if spec.id in ("train-0", "train-1", "train-2", "train-3", "train-4") else Ending.SUCCEEDED
        return float(index % 2), [call(f"{spec.id}.{index}")], ending

    run = ScriptedRun(tmp_path, half_fail, training={"steps": 1, "tasks_per_step": 10})
    assert (await run.start()).version == 1


async def test_an_error_of_an_evaluation_beside_the_next_step_ends_the_run_at_once(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, held_out=1, training={"steps": 3, "max_staleness": 1}, evaluation={"every": 1})
    enqueue = run.store.enqueue

    async def refuse(name: str, spec: GroupSpec) -> Any:
        if spec.id.startswith("eval-1"):
            raise TrainingError("no such task")
        if spec.step and spec.step > 2:
            await asyncio.Event().wait()  # a step that collects for ever
        return await enqueue(name, spec)

    run.store.enqueue = refuse
    with pytest.raises(TrainingError, match="no such task"):
        await asyncio.wait_for(run.start(), 30)


async def test_a_step_is_reported_and_saved_though_the_next_one_fails(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, held_out=1, training={"steps": 3, "max_staleness": 1}, checkpoints={"every": 1})
    accumulate = run.learner.accumulate

    async def fail_in_step_two(policy: str, update: Update) -> UpdateMetrics:
        if "start 2" in run.journal:
            raise TrainingError("out of memory")
        return await accumulate(policy, update)

    run.learner.accumulate = fail_in_step_two
    with pytest.raises(TrainingError, match="out of memory"):
        await run.start()
    assert [report.step for report in run.observer.reports] == [1] and "copy 1" in run.journal


@pytest.mark.parametrize("held_out", [0, 32], ids=["in a step", "in an evaluation"])
async def test_a_run_that_ended_because_its_agent_failed_goes_on_when_that_is_corrected(
    tmp_path: Path, held_out: int
) -> None:
    """The failures that the store has do not end it again."""

    def broken(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        if spec.id.startswith("eval-2-") or (not held_out and int(spec.id.removeprefix("train-")) >= 4):
            return None, [], Ending.AGENT_ERROR
        return one_call(spec, index)

    settings: dict[str, Any] = {"training": {"steps": 4}, "checkpoints": {"every": 1}, "evaluation": {"every": 2}}
    run = ScriptedRun(tmp_path, broken, held_out=held_out, **settings)
    with pytest.raises(TrainingError, match="different tasks in a row succeeded"):
        await run.start()
    run.store.script = one_call
    run.open()
    assert (await run.start()).step == 4


STUCK = """
import time
from pathlib import Path

def stuck(*_):
    folder = Path(__file__).parent
    (folder / "begun").touch()
    for _ in range(6000):
        if (folder / "release").exists():
            break
        time.sleep(0.01)
    (folder / "ended").touch()
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": {"credit": "mine.py:stuck"}},
        {"algorithm": {"credit": "sampled", "branch": "mine.py:stuck"}},
        {"signals": {"cut": 1.0, "rule": "mine.py:stuck"}},
        {"algorithm": {"credit": "mine.py:stuck"}, "training": {"flat_groups": "refill"}},
    ],
    ids=["credit", "branch", "rule", "refill"],
)
def test_a_run_that_is_cancelled_does_not_wait_for_a_function_of_the_user(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    (tmp_path / "mine.py").write_text(STUCK)

    def two_cut_calls(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
        answer = {"role": "assistant", "content": "so"}
        calls = [call(f"{spec.id}.{index}.{n}", finish="length", response=answer) for n in (0, 1)]
        return float(index % 2), calls, Ending.SUCCEEDED

    run = ScriptedRun(tmp_path / "run", two_cut_calls, base=str(tmp_path), **settings)

    async def cancelled() -> None:
        training = asyncio.create_task(run.start())
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
            assert not training.done(), training.exception()
        training.cancel()
        await asyncio.wait({training})

    asyncio.run(cancelled())
    assert not (tmp_path / "ended").exists()
    (tmp_path / "release").touch()
