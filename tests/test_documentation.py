"""Messages name pages of the documentation as files that an installed wheel has too."""

import ast
from collections.abc import Iterator
from pathlib import Path

from leyden.documentation import page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/leyden"


def named_pages() -> Iterator[tuple[str, list[str]]]:
    """Where a message names a page, with the page and the section."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == page.__name__:
                texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                if len(texts) == len(node.args):
                    yield f"{path}:{node.lineno}", texts


def test_the_pages_and_sections_that_messages_name_exist() -> None:
    named = list(named_pages())
    assert len(named) >= 7
    for place, (name, *section) in named:
        file, _, heading = page(name, *section).partition(", ")
        assert Path(file).is_file(), place
        assert not heading or f"\n## {heading}\n" in Path(file).read_text(), place


def test_no_message_names_a_page_that_only_a_clone_has() -> None:
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                assert "docs/" not in node.value, f"{path}:{node.lineno}"
    for path in (SOURCE / "server/dashboard/static").glob("*"):
        assert b"docs/" not in path.read_bytes(), path
