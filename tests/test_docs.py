"""The commands, files and keys in the documentation are correct."""

import re
import subprocess
from pathlib import Path

import msgspec
from serving import ServerProcess

from leyden.config import Config

DOCS = Path(__file__).parent.parent / "docs"


def test_the_commands_of_the_api_page_work(server: ServerProcess) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / "api.md").read_text(), re.DOTALL)
    settings = (
        blocks[0].replace("http://127.0.0.1:8484", server.url).replace("runs/admin.key", f"{server.home}/admin.key")
    )
    output = subprocess.run(
        ["bash", "-e", "-c", "\n".join([settings, *blocks[1:]]).replace("wait=60", "wait=1")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert '"error"' not in output
    assert '"counted":true' in output
    assert '"ending":"succeeded"' in output
    assert len(re.findall("curl", "".join(blocks))) >= 8


def test_the_readme_names_files_that_exist() -> None:
    root = DOCS.parent
    for named in re.findall(r"\]\(([^)]+)\)", (root / "README.md").read_text()):
        assert (root / named).exists(), named


def test_architecture_names_packages_that_exist() -> None:
    listed = re.search(r"```\nsrc/leyden/\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    assert listed is not None
    source = DOCS.parent / "src" / "leyden"
    for line in listed[1].splitlines():
        if "planned" in line or not line.startswith("  ") or line.startswith("   "):
            continue
        named = line.split()[0]
        assert (source / named).exists(), named


def test_every_key_of_a_configuration_is_documented() -> None:
    text = (DOCS / "training.md").read_text()
    for section in msgspec.structs.fields(Config):
        inner = section.type if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct) else None
        names = [f"{section.name}.{key.name}" for key in msgspec.structs.fields(inner)] if inner else [section.name]
        for name in names:
            assert f"`{name}`" in text, f"docs/training.md does not say what {name} is"
