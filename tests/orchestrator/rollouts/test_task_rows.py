"""The files that tasks are read from."""

import datetime
from pathlib import Path

import pytest

from leyden.config import ConfigError, read_config
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
    config = read_config({"run": "r", "agent": "a", "tasks": "t.csv", "drop_duplicates": True, "base": str(tmp_path)})
    assert [task.input["q"] for task in read_task_file(config, config.tasks)] == ["a", "b"]


def test_data_sets_of_hugging_face_are_read_and_their_columns_renamed(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    day = datetime.date(2026, 1, 2)
    tables = [pyarrow.table({"problem": [f"{number}?"], "day": [day], "n": [{"a": [number]}]}) for number in (1, 2)]
    for number, table in enumerate(tables):
        parquet.write_table(table, tmp_path / f"train-0000{number}-of-00002.parquet")
        with pyarrow.ipc.new_stream(tmp_path / f"data-0000{number}-of-00002.arrow", table.schema) as writer:
            writer.write_table(table)
    rows = [(n, {"day": "2026-01-02", "n": {"a": [n]}, "question": f"{n}?"}) for n in (1, 2)]
    assert read_rows(tmp_path / "train-*.parquet", "tasks", {"question": "problem"}) == rows
    (saved := tmp_path / "saved").mkdir()
    for file in tmp_path.glob("*.arrow"):
        file.rename(saved / file.name)
    (saved / "state.json").write_text("{}")
    assert read_rows(saved, "tasks", {"question": "problem"}) == rows
    with pytest.raises(ConfigError, match="has no 'text'; it has problem, day, n"):
        read_rows(saved, "tasks", {"question": "text"})
    with pytest.raises(ConfigError, match=r"names no \.parquet or \.arrow file"):
        read_rows(tmp_path / "test-*.parquet", "tasks")
    (tmp_path / "broken.parquet").write_text("no table")
    with pytest.raises(ConfigError, match=r"broken\.parquet: "):
        read_rows(tmp_path / "broken.parquet", "tasks")
