"""What is missing can be installed from where Leyden came: no index has it yet."""

import json
from pathlib import Path

import pytest

from leyden import extras


class Distribution:
    def __init__(self, origin: dict[str, object] | None) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.origin and json.dumps(self.origin)


def test_in_a_clone_the_command_installs_the_clone() -> None:
    root = Path(__file__).parents[1]
    assert extras.install_command("ray") == f"pip install -c {root}/constraints.txt -e '{root}[ray]'"


@pytest.mark.parametrize(
    ("origin", "requirement"),
    [
        ({"url": "file:///d/leyden.whl", "archive_info": {}}, "leyden[ray] @ file:///d/leyden.whl"),
        ({"url": "https://host/leyden", "vcs_info": {"vcs": "git"}}, "leyden[ray] @ git+https://host/leyden"),
        (None, "leyden[ray]"),
    ],
)
def test_elsewhere_it_installs_from_the_same_origin(
    origin: dict[str, object] | None, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "_CLONE", tmp_path)
    monkeypatch.setattr(extras, "distribution", lambda name: Distribution(origin))
    assert extras.install_command("ray") == f"pip install '{requirement}'"


def test_no_page_and_no_message_installs_what_no_index_has() -> None:
    root = Path(__file__).parents[1]
    pages = [
        root / "README.md",
        *root.glob("docs/*.md"),
        *root.glob("examples/*/README.md"),
        *root.glob("src/**/*.py"),
    ]
    named = [str(page) for page in pages if "pip install 'leyden[" in page.read_text() and page.stem != "extras"]
    assert not named
