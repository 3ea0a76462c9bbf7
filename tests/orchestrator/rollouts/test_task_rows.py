"""The files that tasks are read from."""

from pathlib import Path

import pytest

from leyden.config import ConfigError
from leyden.orchestrator.rollouts.task_rows import read_rows
from leyden.orchestrator.rollouts.tasks import read_task_file

BOM = "\ufeff"


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("t.jsonl", BOM + '{"q": "a"}\n\n{"q": "b"}\n', [(1, {"q": "a"}), (3, {"q": "b"})]),
        ("t.json", BOM + '[{"q": "a"},\n {"q": "b"}]', [(1, {"q": "a"}), (2, {"q": "b"})]),
        (
            "t.csv",
            BOM + 'q,answer\r\n"a, ""x""\nc",1\r\nb,2\r\n',
            [(3, {"q": 'a, "x"\nc', "answer": "1"}), (4, {"q": "b", "answer": "2"})],
        ),
    ],
)
def test_rows_are_read(name: str, text: str, rows: list[object], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, newline="")
    assert read_rows(tmp_path / name, "tasks") == rows


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.json", '{"q": 1}', "write an array of JSON objects"),
        ("t.json", "[1]", "t.json:1: a task is a JSON object"),
        ("t.csv", "q,answer\na\n", "t.csv:2: this line does not have as many values"),
    ],
)
def test_a_file_of_another_form_is_named(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_rows(tmp_path / name, "tasks")
    assert says in str(caught.value)


def test_duplicates_are_dropped_if_asked(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("q\na\nb\na\n")
    assert [task.input["q"] for task in read_task_file(tmp_path / "t.csv", drop_duplicates=True)] == ["a", "b"]
