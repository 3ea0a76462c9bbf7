"""What `make dist` builds is complete, and works where nothing else is installed."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

import pytest

from leyden import __version__

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("dist")]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with wheel and source archive. `make` also has twine check them."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(["make", "dist", f"DIST={folder}"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder that is not in memory: torch with CUDA takes gigabytes."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(f"leyden-{__version__}.dist-info/METADATA"))


def test_both_have_every_file_of_the_package_and_the_licence(dist: Path, wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    package = {name.removeprefix("src/") for name in listed.split()} - {"leyden/demo", "leyden/docs"}
    demo = {
        f"leyden/demo/{name}" for name in ("agent.py", "calc.toml", "tasks.jsonl", "held_out.jsonl", "unseen.jsonl")
    }
    docs = {f"leyden/docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"leyden-{__version__}.dist-info/")}
        licence = archive.read(f"leyden-{__version__}.dist-info/licenses/LICENSE")
    assert names == package | demo | docs
    assert licence == (ROOT / "LICENSE").read_bytes()
    (source,) = dist.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {f"src/{name}" for name in package | demo | docs} | {"LICENSE", "README.md", "constraints.txt"}
    assert not any(name.startswith("tests") for name in names)


def test_the_metadata_are_those_of_the_project(wheel: Path) -> None:
    about, project = metadata(wheel), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (about["Name"], about["Version"]) == ("leyden", __version__)
    assert about["License-Expression"] == "Apache-2.0" and about["License-File"] == "LICENSE"
    assert set(about.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])


def interpreter(version: str) -> str:
    """A Python of a version, on the path or among those of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for program in filter(None, [shutil.which(f"python{version}"), *pyenv.glob(f"{version}.*/bin/python3")]):
        if subprocess.run([program, "--version"], capture_output=True).returncode == 0:
            return str(program)
    pytest.skip(f"no Python {version} on this machine")


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_trains_in_an_empty_environment(version: str, wheel: Path, tmp_path: Path, disk: Path) -> None:
    subprocess.run([interpreter(version), "-m", "venv", disk], check=True)
    bin = disk / "bin"
    install = [bin / "python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt"]
    subprocess.run([*install, f"leyden[train,demo] @ {wheel.as_uri()}"], check=True)
    shown = subprocess.run([bin / "python", "-m", "leyden", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"leyden {__version__}\n"
    size = ["training.steps=1", "training.tasks_per_step=2", "training.group_size=2", "evaluation.rollouts=1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([bin / "leyden", "demo", *size], cwd=tmp_path, check=True, env=environment)
    assert (tmp_path / "runs" / "demo" / "curve.png").is_file()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_packages_of_all_extras_can_be_found(version: str, wheel: Path, tmp_path: Path) -> None:
    """In the versions of constraints.txt, except vLLM's: it pins some packages to others."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([tmp_path / "venv/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
    extras = set(metadata(wheel).get_all("Provides-Extra", [])) - {"vllm"}
    for wanted, constraints in ((",".join(sorted(extras)), ["-c", ROOT / "constraints.txt"]), ("train,vllm", [])):
        (tmp_path / "needed.in").write_text(f"leyden[{wanted}] @ {wheel.as_uri()}\n")
        words = ["pip", "compile", "--quiet", "--python-version", version, *constraints, tmp_path / "needed.in"]
        subprocess.run([tmp_path / "venv/bin/uv", *words], check=True, stdout=subprocess.DEVNULL)
