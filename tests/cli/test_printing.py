"""Tables are as wide as their ids, on a terminal and elsewhere."""

import io

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from leyden.cli.printing import print_table

ID = "eval-0-" + 90 * "9"
MESSAGE = "nothing came of it, and there is a lot to say about that: " + 50 * "x"


def printed(width: int, terminal: bool) -> list[str]:
    table = Table("rollout", "task", "message", box=box.SIMPLE, pad_edge=False)
    table.add_row(ID, "t", MESSAGE)
    table.add_row("short", "t", "")
    console = Console(file=io.StringIO(), width=width, soft_wrap=not terminal)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 80, 140])
def test_on_a_terminal_only_the_message_is_folded(width: int) -> None:
    lines = printed(width, terminal=True)
    assert [ID, "t"] in [line.split()[:2] for line in lines]
    assert max(map(len, lines)) <= max(width, len(ID) + 40)
    assert "".join(line.split()[-1] for line in lines if "x" in line).endswith(50 * "x")


def test_elsewhere_a_row_is_a_line_and_ends_with_its_last_word() -> None:
    head, first, second = printed(20, terminal=False)
    assert head.split() == ["rollout", "task", "message"]
    assert first.split(maxsplit=2) == [ID, "t", MESSAGE]
    assert second.startswith("short ") and second.endswith(" t")
