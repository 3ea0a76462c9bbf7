"""The files of deploy/ can be read, and name commands, settings, paths and variables that exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from leyden.cli import parser
from leyden.config import override, read_config

DEPLOY = Path(__file__).parents[1] / "deploy"
SCRIPTS = sorted(DEPLOY.glob("slurm/*.sbatch"))
UNITS = sorted(DEPLOY.glob("*.service"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def containers() -> list[dict[str, Any]]:
    pods = [document["spec"]["template"]["spec"] for path in MANIFESTS for document in documents(path)[-1:]]
    return [container for pod in pods for container in pod["containers"]]


def commands() -> list[list[str]]:
    """The words of every `leyden` command."""
    found = [container["args"] for container in containers()]
    found += [documents(DEPLOY / "compose.yaml")[0]["services"]["server"]["command"]]
    for path in (*SCRIPTS, *UNITS):
        text = path.read_text().replace("\\\n", " ")
        found += [shlex.split(words) for words in re.findall(r"^(?:srun |ExecStart=\S*/)leyden (.*)$", text, re.M)]
    return found


@pytest.mark.parametrize("words", commands(), ids=lambda words: words[0])
def test_a_command_has_arguments_and_settings_that_exist(words: list[str]) -> None:
    given = {
        "http://$server:$port": "http://trainer:8484",
        "$SLURM_CPUS_PER_TASK": "8",
        "server.port=$port": "server.port=1",
    }
    options, rest = parser(words[0]).parse_known_args([given.get(word, word) for word in words])
    settings = [*getattr(options, "settings", []), *rest]
    read_config(override({"run": "r", "agent": "a:b", "tasks": "t"}, settings))


def test_there_is_a_command_of_every_file() -> None:
    assert sorted(words[0] for words in commands()) == ["serve", "serve", "train", "train", "worker", "worker"]


def test_what_manifests_refer_to_is_there() -> None:
    kinds = {(one["kind"], one["metadata"]["name"]): one for path in MANIFESTS for one in documents(path)}
    service, job = kinds["Service", "leyden"], kinds["Job", "leyden-train"]["spec"]["template"]
    assert service["spec"]["selector"] == job["metadata"]["labels"]
    assert job["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] in {name for _, name in kinds}
    worker = kinds["Deployment", "leyden-worker"]["spec"]
    assert worker["selector"]["matchLabels"] == worker["template"]["metadata"]["labels"]
    source = Path(__file__).parents[1] / "src" / "leyden"
    assert (
        job["spec"]["containers"][0]["readinessProbe"]["httpGet"]["path"] in (source / "api/endpoints.py").read_text()
    )


def test_variables_exist() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    named = {name for path in files for name in re.findall(r"LEYDEN_[A-Z]+(?:_[A-Z]+)*", path.read_text())}
    source = "".join(path.read_text() for path in (DEPLOY.parent / "src").glob("**/*.py"))
    assert {"LEYDEN_HOME", "LEYDEN_STORE"} <= named
    assert not [name for name in named - {"LEYDEN_PORT"} if f'"{name}"' not in source]  # the port is the scripts' own


def test_what_an_image_is_built_from_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (DEPLOY.parent / ".dockerignore").read_text().split() if line.startswith("!")}
    assert {"src", "examples/calc_plain", "pyproject.toml", "constraints.txt", "LICENSE", "README.md"} <= sent
    assert all((DEPLOY.parent / name).exists() for name in sent)


def test_linters_find_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    subprocess.run([hadolint, DEPLOY / "Dockerfile"], check=True)
    for script in SCRIPTS:
        subprocess.run(["bash", "-n", script], check=True)
    if (analyse := shutil.which("systemd-analyze")) is not None:
        said = subprocess.run([analyse, "verify", *UNITS], capture_output=True, text=True).stderr
        assert not [line for line in said.splitlines() if "leyden" in line and "is not executable" not in line], said
