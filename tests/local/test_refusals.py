"""What `leyden train` and `leyden worker` refuse, in one line that says what to change."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from forked_commands import run_command
from trainings import Training

from leyden.config import ConfigError, override, read_config, read_file
from leyden.extras import install_command
from leyden.local.train import train
from leyden.models.source import BUNDLED


def leyden(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, cwd=folder)


def refusal(folder: Path, *settings: str) -> str:
    """The one line with which a training is refused."""
    config = read_config(override(read_file(folder / "small.toml"), [f"home={folder}/runs", *settings]))
    with pytest.raises(ConfigError) as caught:
        asyncio.run(train(config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model=nowhere/nothing", "`model`: 'nowhere/nothing' is neither bundled"),
        ("model=runs", "has no config.json"),
        ("tasks=other.jsonl", "`tasks`: "),
        ("agent=agent.py:solv", "did you mean 'solve'"),
        ("reward=agent.py:nothing", "has no 'nothing'"),
        ("algorithm.advantage=grop", "`algorithm.advantage`: there is no 'grop'"),
    ],
)
def test_what_is_wrong_is_one_line_before_any_work(setting: str, says: str, tmp_path: Path) -> None:
    Training(tmp_path)
    (tmp_path / "runs").mkdir()
    assert says in refusal(tmp_path, setting)


def test_too_little_memory_is_reported_before_any_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Training(tmp_path)
    monkeypatch.setattr("leyden.learner.memory.free_memory", lambda: 10 * 2**20)
    assert "takes about 0.029 GiB of host memory and 0.0098 are free" in refusal(tmp_path)


def test_a_tokenizer_without_a_chat_template_and_a_bad_line(tmp_path: Path) -> None:
    training = Training(tmp_path)
    shutil.copytree(str(BUNDLED["spark"]), tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{}")
    assert "has no chat template" in refusal(tmp_path, "model=broken")
    (training.folder / "tasks.jsonl").write_text('{"question": "x"}\n{')
    assert "tasks.jsonl:2: this line is not JSON" in refusal(tmp_path)


def test_the_command_says_it_in_one_line_too(tmp_path: Path) -> None:
    Training(tmp_path)
    done = leyden(tmp_path, "train", "small.toml", "training.stepz=3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "leyden: `training.stepz` is no key: did you mean `training.steps`?\n"


@pytest.mark.slow
def test_an_agent_that_is_broken_is_not_trained(tmp_path: Path) -> None:
    training = Training(tmp_path)
    (tmp_path / "agent.py").write_text(
        "def solve(task):\n    return task['qestion']\n\n\ndef reward(task):\n    return 1\n"
    )
    done = leyden(training.folder, "train", "small.toml")
    assert done.returncode == 1
    assert re.search(
        r"no rollout of 8 different tasks in a row succeeded; (\d+) of \1 ended agent_error: KeyError: 'qestion'",
        done.stderr,
    )


def test_settings_that_do_nothing_or_name_nothing_are_reported(tmp_path: Path) -> None:
    settings = ("algorithm.gamma=0.5", "training.tasks_per_step=9", 'training.roles=["plannner"]')
    done = leyden(Training(tmp_path).folder, "train", "small.toml", *settings)
    assert done.returncode == 1
    assert '`algorithm.gamma` does nothing with `credit = "identical"`' in done.stderr
    assert re.search(r"a step takes 9 tasks and there are \d+: some come twice", done.stderr)
    assert "calls had the roles (none); `training.roles` names those that are trained on. A call has the" in done.stderr
    assert install_command("trace") in done.stderr and "`[roles]`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_user_function_that_fails_ends_the_run_in_one_line(tmp_path: Path) -> None:
    training = Training(tmp_path)
    (tmp_path / "own.py").write_text("def loss(tokens, terms):\n    return -tokens.current.mean(), {}\n")
    done = leyden(training.folder, "train", "small.toml", "algorithm.loss=own.py:loss")
    assert done.returncode == 1
    assert "leyden: `algorithm.loss` returned a tensor of shape () " in done.stderr and "Traceback" not in done.stderr


def test_a_worker_says_what_it_lacks(tmp_path: Path) -> None:
    Training(tmp_path)
    assert "no server: name it with --server" in leyden(tmp_path, "worker", "small.toml").stderr
    assert "needs a key" in leyden(tmp_path, "worker", "small.toml", "--server", "http://127.0.0.1:9").stderr


def test_a_run_that_came_to_nothing_may_begin_with_another_configuration(tmp_path: Path) -> None:
    training = Training(tmp_path, "training.steps=1", "held_out=1")
    nowhere = leyden(tmp_path, "train", "small.toml", "server.host=192.0.2.1", "training.group_size=2")
    assert nowhere.returncode == 1
    assert "`server`: cannot listen on 192.0.2.1" in nowhere.stderr
    agent = (tmp_path / "agent.py").read_text()
    (tmp_path / "agent.py").write_text(agent.replace("client.post", "client.pest"))
    broken = leyden(tmp_path, "train", "small.toml", "held_out=1", "training.group_size=2")
    assert "no rollout of 8 different tasks in a row succeeded" in broken.stderr
    (tmp_path / "agent.py").write_text(agent)
    began = leyden(tmp_path, "train", "small.toml", *training.settings)
    assert "what was recorded with the earlier one is now" in began.stderr + began.stdout
    assert [row["rollouts/requested"] for row in training.metrics() if row["step"]] == [6]
