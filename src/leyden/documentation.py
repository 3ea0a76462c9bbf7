"""Where messages find the pages of the documentation: they are part of the package."""

from pathlib import Path

_PAGES = (Path(__file__).parent / "docs").resolve()  # in a clone, a link


def page(name: str, section: str = "") -> str:
    """Return how a message names a page, and a section of it: as the file that this installation has."""
    return f"{_PAGES / name}.md" + (f", {section}" if section else "")
