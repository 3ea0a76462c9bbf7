"""Which kind of agent a reference names."""

import sys
from pathlib import Path

import pytest

from leyden.user_code.loading import AgentKind, LoadError, kind_of, read_command


def test_kinds_of_references_are_distinguished(tmp_path: Path) -> None:
    (tmp_path / "my folder").mkdir()
    (tmp_path / "my folder" / "agent.py").touch()
    (tmp_path / "agent.sh").touch(0o755)
    for reference, kind in (
        ("package.module:solve", AgentKind.PYTHON),
        ("agent.py:solve", AgentKind.PYTHON),
        ("my folder/agent.py:solve", AgentKind.PYTHON),
        ("/runs of mine/solve-abc.pkl", AgentKind.PYTHON),
        ("nothing", AgentKind.PYTHON),
        ("node agent.mjs", AgentKind.COMMAND),
        ("python agent.py --url http://x:1", AgentKind.COMMAND),
        ("./agent.sh", AgentKind.COMMAND),
        ("agent.sh", AgentKind.COMMAND),
        ("true", AgentKind.COMMAND),
        ("http://localhost:80/act", AgentKind.ENDPOINT),
        ("https://agents.example.com/act?kind=1", AgentKind.ENDPOINT),
    ):
        assert kind_of(reference, str(tmp_path)) is kind, reference


def test_a_command_is_split_without_a_shell_and_found_in_the_folder_or_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "agent.sh").touch(0o755)
    program, *words = read_command("./agent.sh 'two words' $HOME > file", str(tmp_path))
    assert program == str((tmp_path / "agent.sh").resolve()) and words == ["two words", "$HOME", ">", "file"]
    assert Path(read_command("sh -c x", str(tmp_path))[0]).name == "sh"
    with pytest.raises(LoadError, match=r"there is no '\./sh'"):
        read_command("./sh -c x", str(tmp_path))


def test_the_python_of_a_virtual_environment_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    assert read_command("./python agent.py", str(tmp_path)) == [str(tmp_path / "python"), "agent.py"]


def test_a_python_file_without_a_function_suggests_one(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def reward(task, result): ...\nasync def solve(task): ...\n")
    with pytest.raises(LoadError, match=r"write a\.py:solve$"):
        read_command("a.py", str(tmp_path))
