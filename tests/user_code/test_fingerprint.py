"""An edit of the agent, the reward or the tasks is noticed when a run goes on."""

from pathlib import Path

import msgspec
import pytest
from trainings import AGENT, Training

from leyden.config import Config, ConfigError, override, read_config, read_file
from leyden.runs.run_folder import RunFolder
from leyden.user_code.fingerprint import changed_parts, fingerprint


@pytest.fixture
def config(tmp_path: Path) -> Config:
    Training(tmp_path)
    (tmp_path / "agent.py").write_text("from scale import unit\n" + AGENT.replace("% 2)", "% unit())"))
    (tmp_path / "scale.py").write_text("UNIT = 2\n\n\ndef unit():\n    return UNIT\n")
    return read_config(override(read_file(tmp_path / "small.toml"), [f"home={tmp_path}/runs"]))


def edit(config: Config, file: str, old: str, new: str) -> None:
    path = Path(config.base, file)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_what_a_function_uses_counts_and_comments_do_not(config: Config) -> None:
    before = fingerprint(config)
    edit(config, "agent.py", "def reward", "# a comment\n\n\ndef unused():\n    return 1\n\n\ndef reward")
    edit(config, "agent.py", "def solve(task):\n", 'def solve(task):\n    """Solve it."""\n')
    with Path(config.base, "agent.py").open("a") as file:
        file.write('if __name__ == "__main__":\n    task = {}\n    solve(task)\n')
    assert changed_parts(before, fingerprint(config)) == []
    edit(config, "scale.py", "UNIT = 2", "UNIT = 3")
    assert changed_parts(before, fingerprint(config)) == ["`UNIT` in scale.py"]
    edit(config, "agent.py", '"max_tokens": 8', '"max_tokens": 9')
    assert changed_parts(before, fingerprint(config)) == ["`UNIT` in scale.py", "`solve` in agent.py"]


@pytest.mark.parametrize(
    ("agent", "helper"),
    [
        ("import tools\n\n\ndef act(task):\n    return tools.price()\n", "tools.py"),
        ("def act(task):\n    from tools import price\n\n    return price()\n", "tools.py"),
        ("from tools import *\n\n\ndef act(task):\n    return price()\n", "tools.py"),
        ("from kit import tools\n\n\ndef act(task):\n    return tools.price()\n", "kit/tools.py"),
        ("import kit.tools as t\n\n\ndef act(task):\n    return t.price()\n", "kit/tools.py"),
        ("try:\n    from tools import price\nexcept ImportError:\n    price = None\nact = price\n", "tools.py"),
    ],
)
def test_a_module_counts_however_it_is_imported(agent: str, helper: str, config: Config) -> None:
    folder = Path(config.base, "agents")  # Python finds modules in the folder of the agent's file
    Path(folder, helper).parent.mkdir(parents=True)
    Path(folder, helper).write_text("RATE = 2\n\n\ndef price():\n    return RATE\n")
    Path(folder, "act.py").write_text(agent)
    config = msgspec.structs.replace(config, agent="agents/act.py:act")
    before = fingerprint(config)
    edit(config, f"agents/{helper}", "RATE = 2", "RATE = 3")
    assert changed_parts(before, fingerprint(config)) == [f"`RATE` in agents/{helper}"]


def test_relative_imports_of_a_package_count(config: Config) -> None:
    package = Path(config.base, "kit")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "act.py").write_text("from . import tools\n\n\ndef act(task):\n    return tools.price()\n")
    (package / "tools.py").write_text("from .act import act\n\n\ndef price():\n    return 2\n")  # a cycle ends
    config = msgspec.structs.replace(config, agent="kit.act:act")
    before = fingerprint(config)
    edit(config, "kit/tools.py", "return 2", "return 3")
    assert changed_parts(before, fingerprint(config)) == ["`price` in kit/tools.py"]


def test_every_statement_that_changes_a_name_counts(config: Config) -> None:
    edit(config, "scale.py", "UNIT = 2\n", "UNIT = 2\nUNIT += 1\nif UNIT:\n    UNIT = 4\n")
    before = fingerprint(config)
    for old, new in (("= 2", "= 3"), ("+= 1", "+= 2"), ("= 4", "= 5")):
        edit(config, "scale.py", old, new)
        assert changed_parts(before, fingerprint(config)) == ["`UNIT` in scale.py"]
        before = fingerprint(config)


def test_a_fingerprint_that_only_covers_more_shows_no_edit(config: Config) -> None:
    now = fingerprint(config)
    before = {name: digest for name, digest in now.items() if "scale.py" not in name}
    assert before and changed_parts(before, now) == []


def test_the_files_of_a_command_count(tmp_path: Path, config: Config) -> None:
    (tmp_path / "agent.sh").write_text("echo 1")
    command = read_config(override(read_file(tmp_path / "small.toml"), ["agent=sh agent.sh --fast"]))
    before = fingerprint(command)
    (tmp_path / "agent.sh").write_text("echo 2")
    assert changed_parts(before, fingerprint(command)) == ["agent.sh"]


def test_a_run_with_trained_steps_is_refused_until_the_change_is_accepted(config: Config) -> None:
    folder = RunFolder.of(config)
    with folder.acquire(config):
        folder.metrics_file.write_text('{"step": 0, "held_out/reward": 0}\n{"step": 1}\n')
    edit(config, "agent.py", "% unit())", "% 3)")
    with (
        pytest.raises(
            ConfigError, match=r"`reward` in agent\.py, `unit` in agent\.py.* changed since .*--accept-changes"
        ),
        folder.acquire(config),
    ):
        pass
    with folder.acquire(config, accept_changes=True) as archive:
        assert archive is None
    with folder.acquire(config):
        pass  # what was accepted is what the run now has


@pytest.mark.parametrize("key", ["tasks", "held_out", "test"])
def test_edited_tasks_are_noticed(key: str, config: Config, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"q": "1 + 1"}\n')
    config = msgspec.structs.replace(config, **{key: "some.jsonl"})
    before = fingerprint(config)
    assert changed_parts(before, fingerprint(config)) == []
    edit(config, "some.jsonl", "1 + 1", "1 + 2")
    assert changed_parts(before, fingerprint(config)) == ["some.jsonl"]


def test_an_edited_function_of_a_notebook_is_an_edit_and_not_another_setting(config: Config) -> None:
    first, second = (msgspec.structs.replace(config, reward=f"/runs/reward-{digest}.pkl") for digest in ("a1", "b2"))
    folder = RunFolder.of(first)
    with folder.acquire(first):
        folder.metrics_file.write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"`reward` changed since run .*: continue with --accept-changes"):
        folder.check(second)
    folder.check(second, accept_changes=True)
    with folder.acquire(second, accept_changes=True):
        pass
    folder.check(second)


def test_functions_of_a_notebook_in_the_root_folder_have_no_fingerprint(config: Config) -> None:
    assert fingerprint(msgspec.structs.replace(config, base="/", agent="/runs/solve-a1.pkl", reward=None)) == {}


def test_before_the_first_step_anything_may_change_and_the_store_begins_anew(config: Config) -> None:
    folder = RunFolder.of(config)
    with folder.acquire(config):
        (folder.path / "leyden.db").touch()
        folder.metrics_file.write_text('{"step": 0, "held_out/reward": 0}\n')
    edit(config, "agent.py", '"max_tokens": 8', '"max_tokens": 9')
    with folder.acquire(config) as archive:
        assert archive is not None and archive.parent == folder.path.parent  # where it is listed with the other runs
        assert archive.name.startswith(f"{folder.path.name}.before-") and archive.stat().st_mode & 0o777 == 0o700
        recorded = {"config.toml", "fingerprint.json", "leyden.db", "metrics.jsonl"}
        assert {file.name for file in archive.iterdir()} == recorded
        assert not folder.metrics_file.exists() and folder.config_file.exists()


def test_two_archives_of_the_same_second_have_two_names(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    folder, names = RunFolder.of(config), []
    for _ in range(3):
        with folder.acquire(config):
            pass
        archive = folder.archive()
        assert archive is not None
        names.append(archive.name.partition(".before-")[2])
    assert names == ["20260101-000000", "20260101-000000-2", "20260101-000000-3"]


def test_before_the_first_step_another_number_of_evaluation_rollouts_begins_anew(config: Config) -> None:
    folder = RunFolder.of(config)
    with folder.acquire(config):
        (folder.path / "leyden.db").touch()
    more = msgspec.structs.replace(config, evaluation=msgspec.structs.replace(config.evaluation, rollouts=3))
    with folder.acquire(more) as archive:
        assert archive is not None and (archive / "leyden.db").exists()
    with folder.acquire(more) as archive:
        assert archive is None
        folder.metrics_file.write_text('{"step": 1}\n')
    with folder.acquire(config) as archive:
        assert archive is None  # evaluations to come may have another number


def test_what_only_changes_the_memory_or_the_time_of_an_update_may_change(config: Config) -> None:
    folder = RunFolder.of(config)
    with folder.acquire(config):
        folder.metrics_file.write_text('{"step": 1}\n')
    freely = {"batch_tokens": 1024, "gradient_checkpointing": True, "layout": "rows", "compile": False}
    freely["time_limit_s"] = 60.0
    folder.check(msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, **freely)))
    slower = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, learning_rate=1e-4))
    with pytest.raises(ConfigError, match=r"`training\.learning_rate` is not what run"):
        folder.check(slower)
