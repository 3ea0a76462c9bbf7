"""After `--restart` every command and the dashboard mean the same run by a name, and touch no other."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from databases import Postgres
from serving import ServerProcess

import leyden
from leyden.api.wire import FinishRequest, GroupSpec, LeaseRequest, RunSpec
from leyden.cli import main
from leyden.config import Config, ConfigError
from leyden.local.serve import find_served
from leyden.models.source import BUNDLED
from leyden.outcomes import Ending, Outcome
from leyden.records import Metric, Purpose, Reward, Task
from leyden.runs.checkpoint_files import write_checksums
from leyden.runs.run_checkpoints import find_checkpoint, require_run_folder
from leyden.runs.run_folder import RunFolder
from leyden.server.control.keys import KeyKind
from leyden.store.store import Store

REWARDS = {"earlier": 0.25, "later": 0.75}


async def record(database: Path | str, reward: float) -> None:
    """Record a run of the id `calc` with one evaluated task."""
    store = await Store(database).start()
    await store.create_run(RunSpec("calc", config={"model": "spark"}))
    await store.enqueue("calc", GroupSpec("eval-1-add", Task("add", {}), 1, Purpose.EVAL, step=1))
    (leased,) = await store.lease(LeaseRequest("worker", run="calc"))
    await store.finish(
        "calc", leased.attempt.id, FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("f", reward),))
    )
    await store.record_metrics("calc", [Metric(1, "reward/mean", reward)])
    await store.close()


def train(config: Config, reward: float) -> None:
    """Leave the folder that a training leaves."""
    folder = RunFolder.of(config)
    with folder.acquire(config):
        asyncio.run(record(folder.path / "leyden.db", reward))
        folder.environment_file.write_text(json.dumps({"cores": f"{reward}"}))
        shutil.copytree(str(BUNDLED["spark"]), folder.path / "step-1")
        (folder.path / "step-1" / "state.json").write_text('{"step": 1}')
        write_checksums(folder.path / "step-1")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with a run that was trained, and trained again with `--restart`."""
    for name in ("LEYDEN_URL", "LEYDEN_KEY", "LEYDEN_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "a.py").write_text("def solve(task): ...\ndef half(task, result): return 0.5\n")
    config = Config(run="calc", agent="a.py:solve", tasks="t.jsonl", base=str(tmp_path), home=str(tmp_path / "runs"))
    train(config, REWARDS["earlier"])
    assert RunFolder.of(config).archive() is not None
    train(config, REWARDS["later"])
    return tmp_path / "runs"


@pytest.fixture
def archived(home: Path) -> str:
    """The name of the earlier run."""
    (name,) = [path.name for path in home.iterdir() if path.name != "calc"]
    assert name.startswith("calc.before-")
    return name


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command; returns what it prints as JSON."""

    def run(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


def rewards(command: Callable[..., Any]) -> dict[str, float]:
    return {run["id"]: run["card"]["reward"] for run in command("runs")}


def test_commands_that_read_agree_about_the_run(home: Path, archived: str, command: Callable[..., Any]) -> None:
    expected = {archived: REWARDS["earlier"], "calc": REWARDS["later"]}
    assert rewards(command) == expected
    assert all(run["bytes"] > 0 for run in command("runs"))
    assert {card["id"]: card["reward"] for card in command("top")["runs"]} == expected
    for name, reward in expected.items():
        shown = command("show", name)
        assert (shown["run"]["id"], shown["summary"]["id"], shown["card"]["id"]) == (name, name, name)
        assert shown["card"]["reward"] == shown["rollouts"][0]["reward"] == reward
        assert command("show", name, "eval-1-add.0")["episodes"][0]["rewards"][0]["value"] == reward
        (card,) = command("top", name)["runs"]
        assert card["reward"] == command("top", name)["latest"]["reward/mean"] == reward
        page = Path(command("report", name)["file"]).read_text()
        assert f"<title>{name}" in page and f"{reward:.3f}" in page and f">{reward}<" in page
        dry = command("rescore", name, "--reward", "a.py:half", "--dry-run")
        assert [(one["before"], one["after"]) for one in dry["rollouts"]] == [(reward, 0.5)]
    assert command("compare", archived, "calc")["result"]["difference"] == 0.5
    assert leyden.compare(archived, "calc", home=home).difference == 0.5


def test_commands_that_need_the_folder_take_the_one_of_the_name(
    home: Path, archived: str, command: Callable[..., Any]
) -> None:
    for name in (archived, "calc"):
        folder = home / name
        assert [part["name"] for part in command("check", name)] == ["leyden.db", "records", "step-1"]
        assert command("prune", name) == {name: 0}
        assert require_run_folder(home, name) == folder  # of `leyden export`
        assert find_checkpoint(name, home) == str(folder / "step-1")  # of `leyden eval`
        (served,) = find_served(name, home)
        assert (served.name, served.source.folder) == (name, folder / "step-1")
    (home / archived / "leyden.db").write_bytes(b"damaged")
    assert require_run_folder(home, "calc") == home / "calc"
    assert main(["check", archived]) == 1
    with pytest.raises(ConfigError, match=f"no run 'other' with a folder in .*; there are calc, {archived}"):
        require_run_folder(home, "other")


@pytest.mark.parametrize("which", REWARDS)
def test_rescore_and_delete_touch_only_the_named_run(
    home: Path, archived: str, which: str, command: Callable[..., Any]
) -> None:
    names = {"earlier": archived, "later": "calc"}
    name, kept = names.pop(which), names.popitem()
    command("rescore", name, "--reward", "a.py:half")
    assert rewards(command) == {name: 0.5, kept[1]: REWARDS[kept[0]]}
    command("delete", name, "--yes")
    assert rewards(command) == {kept[1]: REWARDS[kept[0]]} and [path.name for path in home.iterdir()] == [kept[1]]


def test_show_and_delete_agree_about_a_folder_with_several_runs(
    home: Path, archived: str, command: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(add_run(home / archived / "leyden.db"))
    assert command("show", archived)["card"]["reward"] == REWARDS["earlier"]
    assert command("show", f"{archived}:other")["card"]["reward"] is None
    config = home / archived / "config.toml"
    config.write_text(config.read_text().replace('run = "calc"', 'run = "gone"'))
    for arguments in (["show", archived], ["delete", archived, "--yes"]):
        assert main(arguments) == 1
        assert f"no run '{archived}': there are calc, {archived}:calc, {archived}:other" in capsys.readouterr().err
    command("delete", f"{archived}:other", "--yes")
    command("delete", archived, "--yes")
    assert [path.name for path in home.iterdir()] == ["calc"]


async def add_run(database: Path) -> None:
    store = await Store(database).start()
    await store.create_run(RunSpec("other"))
    await store.close()


def test_the_dashboard_shows_each_run_under_its_name(home: Path, archived: str) -> None:
    with ServerProcess(home) as server:
        headers = {"authorization": f"Bearer {server.key(KeyKind.VIEWER)}"}

        def get(path: str) -> Any:
            reply = requests.get(server.url + path, headers=headers, timeout=30)
            assert reply.status_code == 200, reply.text
            return reply.json()

        expected = {archived: REWARDS["earlier"], "calc": REWARDS["later"]}
        assert {card["id"]: card["reward"] for card in get("/api/overview")} == expected
        for name, reward in expected.items():
            assert (get(f"/api/runs/{name}/card")["id"], get(f"/api/runs/{name}/view")["id"]) == (name, name)
            assert get(f"/api/runs/{name}/search")["rollouts"][0]["reward"] == reward
            assert get(f"/api/runs/{name}/rewards")["held_out"][0]["mean"] == reward
            assert get(f"/api/runs/{name}/series")["reward/mean"]["values"] == [reward]
            assert get(f"/api/runs/{name}/rollouts/eval-1-add.0/view")["rewards"][0]["value"] == reward
        with requests.get(server.url + "/api/stream", headers=headers, stream=True, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            asyncio.run(add_metric(home / archived / "leyden.db"))
            assert archived in json.loads(next(line for line in lines if b"metrics" in line).partition(b": ")[2])


async def add_metric(database: Path) -> None:
    store = await Store(database).start()
    await store.record_metrics("calc", [Metric(2, "reward/mean", 0.5)])
    await store.close()


def test_a_run_of_the_home_folders_store_and_one_with_a_folder_have_two_names(
    home: Path, archived: str, command: Callable[..., Any]
) -> None:
    asyncio.run(record(home / "leyden.db", 1.0))
    assert rewards(command) == {"calc": 1.0, "calc:calc": REWARDS["later"], archived: REWARDS["earlier"]}
    assert command("show", "calc:calc")["card"]["reward"] == REWARDS["later"]
    assert require_run_folder(home, "calc:calc") == home / "calc"
    with pytest.raises(ConfigError, match="no run 'calc' with a folder"):
        require_run_folder(home, "calc")
    command("delete", "calc", "--yes")
    assert rewards(command) == {"calc": REWARDS["later"], archived: REWARDS["earlier"]}


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
def test_the_database_that_a_variable_names_has_names_before_folders(
    dialect: str,
    home: Path,
    archived: str,
    command: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    postgres: Postgres | None,
) -> None:
    if dialect == "postgresql" and postgres is None:
        pytest.skip("needs initdb")
    store = postgres.new_database() if dialect == "postgresql" and postgres else str(home.parent / "server.db")
    monkeypatch.setenv("LEYDEN_STORE", store)
    asyncio.run(record(store, 1.0))
    assert rewards(command) == {"calc": 1.0}
    assert command("show", "calc")["card"]["reward"] == 1.0
    for words in (["check", "calc"], ["prune", "calc"], ["export", "calc", "--to", str(home.parent / "exported")]):
        assert main(words) == 1
        assert f"no run 'calc' with a folder in runs; there are calc:calc, {archived}" in capsys.readouterr().err
    assert find_checkpoint("calc", home) is None
    assert require_run_folder(home, "calc:calc") == home / "calc"
    assert require_run_folder(home, archived) == home / archived
    with ServerProcess(home) as server:
        assert main(["delete", "calc", "--yes"]) == 1
        assert "in use by another server" in capsys.readouterr().err
        headers = {"authorization": f"Bearer {server.key(KeyKind.VIEWER)}"}
        cards = requests.get(f"{server.url}/api/overview", headers=headers, timeout=30).json()
        expected = {"calc": 1.0, "calc:calc": REWARDS["later"], archived: REWARDS["earlier"]}
        assert {card["id"]: card["reward"] for card in cards} == expected
    command("rescore", "calc", "--reward", "a.py:half")
    assert rewards(command) == {"calc": 0.5}
    command("delete", "calc", "--yes")
    assert rewards(command) == {}
    assert {path.name for path in home.iterdir() if path.is_dir()} == {"calc", archived}


def test_compare_says_which_way(home: Path, archived: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", archived, "calc"]) == 0
    assert f"calc at step 1 minus {archived} at step 1: +0.500" in capsys.readouterr().out
