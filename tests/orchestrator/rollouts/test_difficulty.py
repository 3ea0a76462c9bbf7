"""Drawing tasks by the chance that their rewards differ."""

from collections import Counter
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
import pytest
from scripted_training import ScriptedRun
from smallepisodes import call

from leyden.config import ConfigError, read_config
from leyden.learner.protocol import TaskRecord
from leyden.orchestrator.rollouts.difficulty import Difficulty, informative_chance
from leyden.outcomes import Ending
from leyden.records import Task

TASKS = [Task(f"t{number}", {}) for number in range(40)]
NOTHING = TaskRecord()
EASY, HARD, GOOD = [1.0] * 4, [0.0] * 4, [1.0, 0.0, 1.0, 0.0]


def difficulty(record: TaskRecord = NOTHING, count: int = 40) -> Difficulty:
    return Difficulty(TASKS[:count], 7, 4, 1.0, record)


def test_the_chance_is_that_of_a_beta_posterior() -> None:
    random = np.random.default_rng(0)
    rates = random.beta(3 + 0.5, 1 + 0.5, 200_000)
    expected = np.mean(1 - rates**4 - (1 - rates) ** 4)
    assert informative_chance(np.array([3.0, 1.0]), 0.5, 4) == pytest.approx(expected, abs=0.003)


def test_tasks_whose_rewards_differ_are_drawn_more_often_and_no_other_is_forgotten() -> None:
    found = difficulty()
    found.add_step([("t0", EASY), ("t1", HARD), ("t2", GOOD)])
    draws = [found.draw(position, ()) for position in range(20_000)]
    counts = Counter(draw.task for draw in draws)
    assert counts["t2"] > 4 * counts["t0"] and counts["t2"] > 2 * counts["t5"] > counts["t1"] > 0
    expected = {draw.task: draw.probability for draw in draws}
    assert sum(expected.values()) == pytest.approx(1)
    for task, probability in expected.items():  # the account is exact
        assert counts[task] / 20_000 == pytest.approx(probability, abs=5 * (probability / 20_000) ** 0.5)
    assert min(expected.values()) >= 0.1 / 40


def test_rewards_that_never_reach_the_threshold_are_told_apart_by_their_group() -> None:
    found = difficulty()
    found.add_step([("t0", [0.1, 0.5, 0.2, 0.4]), ("t1", [0.3] * 4)])
    assert found.drawn("t0").chance > found.drawn("t5").chance > found.drawn("t1").chance


def test_an_unknown_task_is_as_informative_as_first_groups_were() -> None:
    found = difficulty()
    for step in range(10):
        found.add_step([(f"t{number}", GOOD if number % 4 == 0 else HARD) for number in range(step * 3, step * 3 + 3)])
    assert found.drawn("t39").chance == pytest.approx(9 / 32, abs=0.05)


def test_what_is_known_of_a_task_is_forgotten() -> None:
    found = difficulty()
    found.add_step([("t0", HARD)])
    before = found.drawn("t0").chance
    for _ in range(200):
        found.add_step([])
    assert found.record.rollouts == {} and found.drawn("t0").chance == found.drawn("t1").chance > before
    found.add_step([("t1", HARD)])
    found.add_step([("t1", GOOD)])
    assert found.record.rollouts["t1"] == pytest.approx((2, 2 + 0.97 * 4 * 0.5))


def test_running_tasks_are_not_drawn_while_others_are_left() -> None:
    found = difficulty(count=3)
    assert {found.draw(position, ("t0", "t1")).task for position in range(50)} == {"t2"}
    assert {found.draw(position, ("t0", "t1", "t2")).task for position in range(50)} == {"t0", "t1", "t2"}


def test_a_record_gives_the_same_draws_again() -> None:
    found = difficulty()
    found.add_step([("t0", EASY), ("t1", HARD), ("t2", GOOD)])
    saved = msgspec.json.encode(found.record)  # as in a checkpoint
    again = difficulty(msgspec.json.decode(saved, type=TaskRecord))
    assert [found.draw(position, ()) for position in range(50)] == [again.draw(position, ()) for position in range(50)]


async def test_a_run_reports_the_chances_of_its_tasks_and_learns_them(tmp_path: Path) -> None:
    settings = {"steps": 40, "group_size": 8, "task_order": "by_difficulty"}
    run = ScriptedRun(
        tmp_path,
        lambda spec, index: (float(spec.task.id == "t3" and index % 2), [call(f"{spec.id}.{index}")], Ending.SUCCEEDED),
        training=settings,
    )
    state = await run.start()
    tasks = [report.tasks for report in run.observer.reports]
    assert tasks[-1]["known"] == 5 and state.task_record.rollouts.keys() == {f"t{number}" for number in range(5)}
    drawn = Counter(episodes[0].task.id for episodes in run.store.sampled.values())
    assert drawn["t3"] == max(drawn.values()) > 30  # of 40: it is not drawn twice in a step
    late = tasks[20:]
    assert fmean(one["chance"] for one in late) > 0.35 and fmean(one["informative"] for one in late) > 0.4
    assert fmean(one["preference"] for one in late) > 1.5


def test_a_single_rollout_has_nothing_to_be_compared_with() -> None:
    training = {"task_order": "by_difficulty", "group_size": 1, "min_group": 1}
    with pytest.raises(ConfigError, match=r"set `training\.group_size` to 2"):
        read_config({"run": "r", "agent": "a", "tasks": "t", "training": training})
