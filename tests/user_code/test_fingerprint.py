"""An edit of code or tasks is noticed by the digests of files."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from leyden.config import Config
from leyden.user_code.fingerprint import Fingerprint, edited_files, fingerprint


@pytest.fixture
def config(tmp_path: Path) -> Config:
    for name in ("agent.py", "scale.py", "kit/tools.py", "kit/parts/wheel.py", "agent.sh", "some.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    return Config(run="small", agent="agent.py:solve", reward="agent.py:reward", tasks="none", base=str(tmp_path))


def edited(config: Config) -> list[str]:
    """Edit every file of the folder; return the code that is noticed."""
    before = fingerprint(config)
    for file in Path(config.base).rglob("*.*"):
        file.write_text("2")
    return edited_files(before.code, fingerprint(config).code)


@pytest.mark.parametrize(
    ("agent", "files"),
    [
        ("agent.py:solve", ["agent.py", "kit/tools.py", "scale.py"]),
        ("agent:solve", ["agent.py", "kit/tools.py", "scale.py"]),
        ("kit.tools:solve", ["agent.py", "kit/parts/wheel.py", "kit/tools.py", "scale.py"]),
        ("kit.parts.wheel:solve", ["agent.py", "kit/parts/wheel.py", "kit/tools.py", "scale.py"]),
        ("kit/tools.py:solve", ["kit/parts/wheel.py", "kit/tools.py"]),  # Python finds modules in the file's folder
        ("sh agent.sh --fast", ["agent.sh"]),
        ("installed.package:solve", []),
        ("http://localhost:1", []),
    ],
)
def test_the_files_in_which_an_agent_finds_its_code_count(config: Config, agent: str, files: list[str]) -> None:
    assert edited(replace(config, agent=agent, reward=None)) == files


def test_the_files_of_the_reward_count(config: Config) -> None:
    assert edited(replace(config, agent="sh agent.sh", reward="kit/parts/wheel.py:reward")) == [
        "agent.sh",
        "kit/parts/wheel.py",
    ]


def test_a_file_that_is_deleted_counts_and_one_that_is_new_does_not(config: Config) -> None:
    before = fingerprint(config)
    Path(config.base, "new.py").touch()
    assert edited_files(before.code, fingerprint(config).code) == []
    Path(config.base, "scale.py").unlink()
    assert edited_files(before.code, fingerprint(config).code) == ["scale.py"]


@pytest.mark.parametrize("key", ["tasks", "held_out", "test"])
def test_edited_tasks_are_noticed(key: str, config: Config) -> None:
    config = replace(config, **{key: "some.jsonl"})
    before = fingerprint(config)
    Path(config.base, "some.jsonl").write_text("2")
    assert edited_files(before.tasks, fingerprint(config).tasks) == ["some.jsonl"]


def test_functions_of_a_notebook_in_the_root_folder_have_no_fingerprint(config: Config) -> None:
    config = replace(config, base="/", agent="/runs/solve-a1.pkl", reward=None)
    assert fingerprint(config) == Fingerprint({}, {})


def test_a_file_that_cannot_be_read_is_left_out(config: Config) -> None:
    (Path(config.base) / "gone.py").symlink_to("nothing.py")
    (Path(config.base) / "folder.py").mkdir()
    assert set(fingerprint(config).code) == {"agent.py", "kit/tools.py", "scale.py"}
