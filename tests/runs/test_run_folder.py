"""The folder of a run: what a start that fails leaves behind, and what may change before a run goes on."""

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from leyden.config import Config, ConfigError
from leyden.runs.run_folder import Resumption, RunFolder


def fail(folder: RunFolder, config: Config, *files: str) -> None:
    """Start in the folder and fail after these files were written."""
    with pytest.raises(ConfigError, match="port"), folder.acquire(config):
        for name in files:
            (folder.path / name).touch()
        raise ConfigError("the port is taken")


def test_a_start_that_fails_before_there_is_a_store_leaves_no_new_folder(tmp_path: Path) -> None:
    config = Config(run="mine", agent="a.py:solve", tasks="t.jsonl", home=str(tmp_path / "runs"))
    (tmp_path / "a.py").write_text("def solve(task): ...")
    folder = RunFolder.of(config)
    fail(folder, config, "server.log")
    assert not folder.path.exists()
    fail(folder, config, "leyden.db")
    assert folder.config_file.exists()
    (folder.path / "leyden.db").unlink()
    fail(folder, config)
    assert folder.config_file.exists()  # the folder is of an earlier start


def test_the_folder_of_a_trial_takes_the_place_of_the_last_one(tmp_path: Path) -> None:
    config = Config(run="mine", agent="a.py:solve", tasks="t.jsonl", home=str(tmp_path))
    (tmp_path / "a.py").write_text("def solve(task): ...")
    first = RunFolder.renewed(config, "dev")
    assert first.path.name == "mine.dev"
    with first.acquire(config):
        assert RunFolder.renewed(config, "dev").path.name == "mine.dev-2"  # another process tries out at the same time
        assert first.config_file.exists()
    assert RunFolder.renewed(config, "dev") == first and not first.path.exists()
    first.path.mkdir()
    first.metrics_file.touch()  # a training that is called `mine.dev`
    assert RunFolder.renewed(config, "dev").path.name == "mine.dev-2" and first.metrics_file.exists()


@pytest.mark.parametrize("mode", [None, 0o755], ids=["new", "opened to others"])
def test_other_users_cannot_open_the_folder_of_a_run(tmp_path: Path, mode: int | None) -> None:
    config = Config(run="mine", agent="a.py:solve", tasks="t.jsonl", home=str(tmp_path / "runs"))
    (tmp_path / "a.py").write_text("def solve(task): ...")
    folder = RunFolder.of(config)
    if mode is not None:
        with folder.acquire(config):
            pass
        folder.path.chmod(mode)
    with folder.acquire(config):
        assert folder.path.stat().st_mode & 0o777 == 0o700


def test_a_start_that_another_was_faster_than_leaves_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(run="mine", agent="a.py:solve", tasks="t.jsonl", home=str(tmp_path / "runs"))
    folder = RunFolder.of(config)

    @contextmanager
    def lost(self: RunFolder) -> Iterator[None]:
        self.path.mkdir(parents=True)  # by the other, after this one looked
        raise ConfigError("another process uses it")
        yield

    monkeypatch.setattr(RunFolder, "lock", lost)
    with pytest.raises(ConfigError, match="another process"), folder.acquire(config):
        pass
    assert folder.path.exists()


def test_a_start_waits_for_who_only_asks_whether_the_run_is_held(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "mine")
    with folder.lock():
        pass
    with (folder.path / "lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        released = threading.Timer(0.02, fcntl.flock, (asking, fcntl.LOCK_UN))
        released.start()
        with folder.lock():
            pass
        released.join()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "agent.py").write_text("1")
    (tmp_path / "tasks.jsonl").write_text("1")
    where = {"base": str(tmp_path), "home": str(tmp_path / "runs")}
    return Config(run="small", agent="agent.py:solve", reward="agent.py:reward", tasks="tasks.jsonl", **where)


def edit(config: Config, file: str) -> None:
    with Path(config.base, file).open("a") as opened:
        opened.write("# edited\n")


def test_edited_code_is_named_once_when_a_run_goes_on(config: Config) -> None:
    folder = RunFolder.of(config)
    with folder.acquire(config) as resumed:
        folder.metrics_file.write_text('{"step": 0, "held_out/reward": 0}\n{"step": 1}\n')
        assert resumed == Resumption([], None)
    edit(config, "agent.py")
    folder.check(config)
    with folder.acquire(config) as resumed:
        assert resumed == Resumption(["agent.py"], None)
    with folder.acquire(config) as resumed:
        assert resumed == Resumption([], None)


def test_edited_tasks_are_refused_until_the_change_is_accepted(config: Config) -> None:
    folder = RunFolder.of(config)
    with folder.acquire(config):
        folder.metrics_file.write_text('{"step": 1}\n')
    edit(config, "tasks.jsonl")
    with pytest.raises(ConfigError, match=r"tasks\.jsonl changed since .*--accept-changes"), folder.acquire(config):
        pass
    with folder.acquire(config, accept_changes=True) as resumed:
        assert resumed == Resumption([], None)
    with folder.acquire(config):
        pass  # what was accepted is what the run now has


def test_an_edited_function_of_a_notebook_is_an_edit_and_not_another_setting(config: Config) -> None:
    first, second = (replace(config, reward=f"/runs/reward-{digest}.pkl") for digest in ("a1", "b2"))
    folder = RunFolder.of(first)
    with folder.acquire(first):
        folder.metrics_file.write_text('{"step": 1}\n')
    folder.check(second)
    with folder.acquire(second) as resumed:
        assert resumed == Resumption(["`reward`"], None)


def test_before_the_first_step_anything_may_change_and_the_store_begins_anew(config: Config) -> None:
    folder = RunFolder.of(config)
    with folder.acquire(config):
        (folder.path / "leyden.db").touch()
        folder.metrics_file.write_text('{"step": 0, "held_out/reward": 0}\n')
    edit(config, "agent.py")
    with folder.acquire(config) as resumed:
        archive = resumed.archive
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
    more = replace(config, evaluation=replace(config.evaluation, rollouts=3))
    with folder.acquire(more) as resumed:
        assert resumed.archive is not None and (resumed.archive / "leyden.db").exists()
    with folder.acquire(more) as resumed:
        assert resumed.archive is None
        folder.metrics_file.write_text('{"step": 1}\n')
    with folder.acquire(config) as resumed:
        assert resumed.archive is None  # evaluations to come may have another number


def test_what_only_changes_the_memory_or_the_time_of_an_update_may_change(config: Config) -> None:
    folder = RunFolder.of(config)
    with folder.acquire(config):
        folder.metrics_file.write_text('{"step": 1}\n')
    freely = {"batch_tokens": 1024, "gradient_checkpointing": True, "layout": "rows", "compile": False}
    freely["time_limit_s"] = 60.0
    folder.check(replace(config, training=replace(config.training, **freely)))
    slower = replace(config, training=replace(config.training, learning_rate=1e-4))
    changed = r"`training\.learning_rate` is not what run .*: it was not set and is 0\.0001\. Set it back to resume"
    with pytest.raises(ConfigError, match=changed):
        folder.check(slower)


def test_a_run_of_another_version_is_refused_in_one_line(tmp_path: Path) -> None:
    config = Config(run="mine", agent="a.py:solve", tasks="t.jsonl", home=str(tmp_path / "runs"))
    folder = RunFolder.of(config)
    with folder.acquire(config):
        (folder.path / "leyden.db").touch()
    folder.fingerprint_file.write_text('{"`solve` in a.py": "00"}')
    with pytest.raises(ConfigError, match="run 'mine' was started by another version"):
        folder.check(config)
    folder.fingerprint_file.write_text('{"co')  # a start that was killed while it wrote
    folder.check(config)
