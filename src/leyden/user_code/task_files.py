"""Which files a path of tasks names: itself, those of a folder, or those that match a pattern."""

from pathlib import Path

TABLES = (".parquet", ".arrow")
"""Endings of files as data sets of Hugging Face have them."""


def task_files(path: Path) -> list[Path]:
    """Return the files in order of their names; the path itself if it is neither a folder nor a pattern."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in TABLES)
    if not path.exists() and "*" in path.name:
        return sorted(path.parent.glob(path.name))
    return [path]
