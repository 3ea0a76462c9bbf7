"""How to add optional packages to this installation of Leyden."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_CLONE = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """Return the command that adds an extra, from where Leyden itself came: a clone, a file, or a package index."""
    if (_CLONE / "pyproject.toml").is_file():
        return f"pip install -c {_CLONE}/constraints.txt -e '{_CLONE}[{extra}]'"
    try:
        origin = json.loads(distribution("leyden").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    if not origin:
        return f"pip install 'leyden[{extra}]'"
    system = origin.get("vcs_info", {}).get("vcs")
    return f"pip install 'leyden[{extra}] @ {system + '+' if system else ''}{origin['url']}'"
