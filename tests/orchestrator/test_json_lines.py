"""Files of lines that a kill may have cut short."""

from pathlib import Path

from leyden.orchestrator.json_lines import append_line, keep_lines, read_lines


def test_a_line_that_was_cut_short_is_removed_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == []
    append_line(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": ')
    keep_lines(path, lambda line: True)
    append_line(path, {"step": 2})
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
