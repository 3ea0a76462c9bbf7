"""What is wrong is said before torch is imported, in one line that names what to change."""

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.cli.train import configuration
from leyden.config import Config
from leyden.local.preflight import check_inputs
from leyden.rl.registry import KINDS
from leyden.runs.run_folder import RunFolder

AGENT = "def solve(task):\n    return 1.0\n"
SCRIPT = """
import contextlib, io, json, sys
from leyden.cli import main

said = []
for setting in sys.argv[1:]:
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            status = main(["train", "small.toml", *setting.split()])
        except SystemExit as refused:
            status = refused.code
    said.append([status, stderr.getvalue()])
print(json.dumps([said, sorted({"torch", "sqlalchemy", "aiohttp"} & set(sys.modules))]))
"""
MISTAKES = {
    "tasks=none.jsonl": "none.jsonl: No such file or directory",
    "tasks=task.jsonl": "task.jsonl: No such file or directory (did you mean tasks.jsonl?)",
    "agent=agent.py:solv": "agent has no 'solv': did you mean 'solve'?",
    "agent=agents.py:solve": "there is no file",
    "agent=nowhere:solve": "there is no module 'nowhere'",
    "agent=nothing": "'nothing' does not name a callable: write module:name",
    "reward=agent.py": "'agent.py' is a file: to use a function of it, write agent.py:NAME",
    "agent=./nothing.sh --fast": "unrecognized arguments: --fast (see leyden train --help)",
    "reward=broken.py:score": "broken.py:score' cannot be imported: SyntaxError: '(' was never closed",
    "training.lr=1e-4": "did you mean `training.learning_rate`?",
    "steps=4": "did you mean `training.steps`?",
    "training.steps=many": "`training.steps`: expected a whole number, got text",
    "training.grup_size=4": "did you mean `training.group_size`?",
    "held_out=9": "`held_out`: 9 of 4 tasks leave none to train on",
    "algorithm.advantage=gpro": "`algorithm.advantage`: there is no 'gpro'; did you mean 'grpo'?",
    "algorithm.loss=agent.py:los": "agent.py:los': agent has no 'los'",
    "model=runs/none/step-3": "there is no folder",
    "model=./models/none": "there is no folder",
    "home=/proc/runs": "`home`: /proc/runs cannot be written to",
    "server.port=PORT": "cannot listen on 127.0.0.1:PORT (Address already in use): choose another port",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "broken.py").write_text("def score(task:\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "small.toml").write_text('agent = "agent.py:solve"\ntasks = "tasks.jsonl"\n')
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(4)))
    return tmp_path


def test_mistakes_are_one_line_before_torch_is_imported(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-c", SCRIPT, *(setting.replace("PORT", port) for setting in MISTAKES)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    said, heavy = json.loads(done.stdout)
    assert not (folder / "runs").exists()
    for (status, text), expected in zip(said, (text.replace("PORT", port) for text in MISTAKES.values()), strict=True):
        assert status in (1, 2) and expected in text and text.count("\n") == 1, (text, expected)
    assert not heavy


FIRST_LINE = """
import os, sys
from leyden.cli import main

class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            heavy = {"transformers", "sqlalchemy", "aiohttp", "numpy"} & set(sys.modules)
            print("torch is next", *sorted(heavy), file=sys.stderr, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch())
main(sys.argv[1:])
"""


@pytest.mark.parametrize("command", ["train small.toml", "dev small.toml", "eval small.toml held_out=1"])
def test_the_first_line_comes_before_torch_and_other_slow_imports(folder: Path, command: str) -> None:
    words = [sys.executable, "-c", FIRST_LINE, *command.split()]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    first, second = done.stderr.splitlines()
    assert first.startswith("tasks: ") and first.endswith("; loading torch and spark")
    assert second == "torch is next"


def test_serving_a_model_says_what_it_loads(folder: Path) -> None:
    words = [sys.executable, "-c", FIRST_LINE, "serve", "--model", "runs/mine"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[0] == "loading torch and runs/mine"


def test_a_command_ends_without_collecting_what_it_loaded(tmp_path: Path) -> None:
    last = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 1000))"  # runs after later ones
    script = f"{last}; from leyden.cli import main; main(['runs', '--home', {str(tmp_path)!r}])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "True"


def test_edited_tasks_are_noticed_before_torch_is_imported(folder: Path) -> None:
    run = RunFolder.of(read(folder, str(folder / "small.toml"), f"home={folder / 'runs'}"))
    with run.acquire(read(folder, str(folder / "small.toml"), f"home={folder / 'runs'}")):
        run.metrics_file.write_text('{"step": 1}\n')
    with (folder / "tasks.jsonl").open("a") as tasks:
        tasks.write('{"question": "another"}\n')
    command = [sys.executable, "-c", SCRIPT, "", "training.group_size=3", "--accept-changes model=nothing/at-all"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    said, heavy = json.loads(done.stdout)
    assert "tasks.jsonl changed since run 'small' was trained, so held-out" in said[0][1]
    assert "`training.group_size` is not what run 'small' started with" in said[1][1]
    assert "`model` is not what run 'small' started with" in said[2][1]
    assert all(text.count("\n") == 1 for _, text in said) and not heavy


def test_an_evaluation_of_a_file_needs_no_other_tasks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read(folder, str(folder / "small.toml"), "tasks=gone.jsonl", "model=one")
    check_inputs(config, str(folder / "tasks.jsonl"), "another")
    assert capsys.readouterr().err == "tasks: 4 to evaluate; loading torch and another\n"


def test_a_package_that_the_agent_imports_and_that_is_not_installed_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imports = (
        "import json, langgraf.graph\nfrom beside import x\ntry:\n    import optional_one\nexcept ImportError: pass\n"
    )
    (folder / "agent.py").write_text(imports + AGENT)
    (folder / "beside.py").touch()
    check_inputs(read(folder, str(folder / "small.toml")))
    said = capsys.readouterr().err.splitlines()
    assert said[:-1] == [f"`agent`: agent.py:solve imports langgraf, which is not installed for {sys.executable}"]
    check_inputs(read(folder, str(folder / "small.toml"), "workers.processes=0"))
    assert len(capsys.readouterr().err.splitlines()) == 1


def read(folder: Path, config: str, *settings: str) -> Config:
    return configuration(argparse.Namespace(config=folder / config, settings=list(settings), home=Path("runs")))


def test_paths_are_relative_to_where_they_are_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("mine.jsonl", "own.py"):
        (elsewhere / name).write_text("{}")
    monkeypatch.chdir(elsewhere)
    settings = ["tasks=mine.jsonl", "reward=own.py:score", "held_out=2"]
    settings += [f"algorithm.{kind}=own.py:{kind}" for kind in KINDS]
    config = read(folder, "small.toml", *settings)
    assert config.tasks == str(elsewhere / "mine.jsonl")
    assert config.reward == f"{elsewhere}/own.py:score"
    for kind in KINDS:
        assert getattr(config.algorithm, kind) == f"{elsewhere}/own.py:{kind}"
    assert (config.agent, config.base) == ("agent.py:solve", str(folder))
    (folder / "homed.toml").write_text('home = "kept"\nagent = "agent.py:solve"\ntasks = "tasks.jsonl"\n')
    assert read(folder, "homed.toml").home == str(folder / "kept")
    assert read(folder, "homed.toml", "home=here").home == "here"


def test_small_mistakes_of_settings_are_understood(folder: Path) -> None:
    settings = ("run=nan", "policy=2024", "training.roles=librarian", "report=tensorboard")
    config = read(folder, "small.toml", *settings)
    assert (config.run, config.policy) == ("nan", "2024")
    assert config.training.roles == ("librarian",)
    assert config.report == ("tensorboard",)
