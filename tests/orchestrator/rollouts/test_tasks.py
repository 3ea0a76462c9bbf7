"""Tasks are read whole or refused, split by seed, and drawn in an order that only the seed decides."""

import json
from pathlib import Path

import pytest

from leyden.config import Config, ConfigError, read_config
from leyden.orchestrator.rollouts.evaluation import rollouts_per_task
from leyden.orchestrator.rollouts.tasks import Tasks, read_task_file, read_tasks, tasks_as_jsonl


def tasks_of(folder: Path, rows: list[dict[str, object]], **settings: object) -> Tasks:
    (folder / "tasks.jsonl").write_text(tasks_as_jsonl(rows))
    return read_tasks(config(folder, **settings))


def config(folder: Path, **settings: object) -> Config:
    base = {"run": "r", "agent": "a:b", "tasks": "tasks.jsonl", "base": str(folder)}
    return read_config({**base, **settings})


ROWS: list[dict[str, object]] = [{"question": f"{n} + 1", "answer": n + 1} for n in range(20)]


def test_every_epoch_has_every_task_once_in_its_own_order(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path, ROWS, held_out=4, seed=3)
    assert len(tasks.train) == 16
    first = [tasks.at(position).id for position in range(16)]
    second = [tasks.at(position).id for position in range(16, 32)]
    assert sorted(first) == sorted(second) == sorted(task.id for task in tasks.train)
    assert first != second
    again = tasks_of(tmp_path, ROWS, held_out=4, seed=3)
    assert [again.at(position).id for position in range(16)] == first
    other = tasks_of(tmp_path, ROWS, held_out=4, seed=4)
    assert [other.at(position).id for position in range(16)] != first


@pytest.mark.parametrize(("held_out", "number"), [(5, 5), (0.25, 5), (0, 0)])
def test_what_is_held_out_is_not_trained_on(held_out: float, number: int, tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path, ROWS, held_out=held_out)
    assert len(tasks.held_out) == number
    assert not {task.id for task in tasks.train} & {task.id for task in tasks.held_out}


def test_tasks_held_out_in_a_file_may_not_be_trained_on(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(tasks_as_jsonl(ROWS[:2]))
    with pytest.raises(ConfigError, match="`held_out` and `tasks` have 2 tasks in common"):
        tasks_of(tmp_path, ROWS, held_out="held.jsonl")


@pytest.mark.parametrize("key", ["held_out", "test"])
def test_an_error_of_a_file_names_its_own_key(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"`{key}`: .*gone.jsonl: No such file"):
        tasks_of(tmp_path, ROWS, **{key: "gone.jsonl"})
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match=f"`{key}`: .*empty.jsonl has no tasks"):
        tasks_of(tmp_path, ROWS, **{key: "empty.jsonl"})


def test_tasks_are_held_out_by_content_and_not_only_by_id(tmp_path: Path) -> None:
    named = [{"id": f"train-{n}", **row} for n, row in enumerate(ROWS)]
    (tmp_path / "held.jsonl").write_text(
        tasks_as_jsonl([{**named[3], "id": "held-a"}, {"id": "held-b", "question": "?"}])
    )
    with pytest.raises(ConfigError, match=r"have 1 tasks in common: held-a \(there train-3\); remove them from one"):
        tasks_of(tmp_path, named, held_out="held.jsonl")
    twice = [*named, *({**row, "id": f"copy-{n}"} for n, row in enumerate(ROWS))]
    with pytest.raises(ConfigError, match=r"`held_out` and `tasks` have \d+ tasks in common: .*there"):
        tasks_of(tmp_path, twice, held_out=10)


def test_a_third_split_is_neither_trained_on_nor_held_out(tmp_path: Path) -> None:
    tasks = tasks_of(tmp_path, ROWS, held_out=4, test=0.25)
    assert [len(part) for part in (tasks.train, tasks.held_out, tasks.test)] == [11, 4, 5]
    assert len({task.id for part in (tasks.train, tasks.held_out, tasks.test) for task in part}) == 20
    assert tasks.held_out == tasks_of(tmp_path, ROWS, held_out=4).held_out  # the same as without it
    (tmp_path / "test.jsonl").write_text(tasks_as_jsonl([{"id": "x", **dict(tasks.held_out[0].input)}]))
    with pytest.raises(ConfigError, match="`test` and `held_out` have 1 tasks in common: x"):
        tasks_of(tmp_path, ROWS, held_out=4, test="test.jsonl")
    with pytest.raises(ConfigError, match="`test`: 16 of 16 tasks leave none to train on"):
        tasks_of(tmp_path, ROWS, held_out=4, test=16)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1}\n{"a": \n', "tasks.jsonl:2: this line is not JSON"),
        ('{"a": 1}\n\n[1]\n', "tasks.jsonl:3: a task is a JSON object"),
        (
            '{"a": 1}\n{"a": 1}\n',
            "1 of 2 tasks are there already, by their `id` or content: line 2 repeats line 1: remove",
        ),
        ('{"id": "a b"}\n', "tasks.jsonl:1: 'a b' cannot be an id"),
        ('{"id": "%s"}' % ("x" * 121), "an `id` has 120 characters at the most"),
        ("\n", "has no tasks"),
    ],
)
def test_a_bad_line_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_task_file(config(tmp_path), "tasks.jsonl")
    assert says in str(caught.value)


def test_an_id_may_be_a_number(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": 7, "q": 1}))
    (task,) = read_task_file(config(tmp_path), "tasks.jsonl")
    assert task.id == "7"


def test_holding_everything_out_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave none to train on"):
        tasks_of(tmp_path, ROWS, held_out=20)


def test_global_normalisation_is_by_a_key_that_tasks_have(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"`algorithm\.normalize_by`: no task has a 'source'; their keys are question"
    ):
        tasks_of(tmp_path, ROWS, algorithm={"normalize_by": "source"})
    assert tasks_of(tmp_path, [*ROWS, {"source": "sql"}], algorithm={"normalize_by": "source"}).train


def test_tasks_that_are_no_json() -> None:
    with pytest.raises(ConfigError, match="must be JSON"):
        tasks_as_jsonl([{"x": object()}])


@pytest.mark.parametrize(("tasks", "rollouts"), [(1, 4), (8, 4), (12, 2), (32, 1), (100, 1)])
def test_few_held_out_tasks_are_run_several_times(tasks: int, rollouts: int) -> None:
    config = read_config({"run": "r", "agent": "a", "tasks": "t"})
    assert rollouts_per_task(config, tasks) == rollouts
    fixed = read_config({"run": "r", "agent": "a", "tasks": "t", "evaluation": {"rollouts": 3}})
    assert rollouts_per_task(fixed, tasks) == 3
