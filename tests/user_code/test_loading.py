"""References: what leads to a callable does, and what does not says why in one line."""

import re
from functools import partial
from pathlib import Path

import pytest

from leyden.user_code.loading import LoadError, load_function, reference_to


def test_modules_files_and_pickles_are_found(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WORD = 'hello'\n")
    (tmp_path / "my_agent.py").write_text(
        "import neighbour\nclass A:\n    @staticmethod\n    def b(task): return task + neighbour.WORD\n"
    )
    (tmp_path / "json.py").write_text("def f(task): return task\n")  # a name that another module has
    assert load_function("my_agent.py:A.b", str(tmp_path))("oh ") == "oh hello"
    assert load_function("my_agent:A.b", str(tmp_path)) is load_function("my_agent.py:A.b", str(tmp_path))
    assert load_function("json.py:f", str(tmp_path))(3) == 3
    assert load_function("json:dumps", str(tmp_path))([]) == "[]"
    extra = 2
    first, second = (reference_to(f, str(tmp_path)) for f in (lambda task: task + extra, lambda task: task - extra))
    assert load_function(first, "/")(1) == 3 and load_function(second, "/")(1) == -1
    assert load_function(reference_to(partial(max, 5), str(tmp_path)), "/")(3) == 5


@pytest.mark.parametrize("name", ["agent_and_reward", "with-dashes", "json"])
def test_a_file_is_executed_once_whatever_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("seen = []\ndef agent(): return seen\ndef reward(): return seen\n")
    agent, reward = (load_function(f"{name}.py:{function}", str(tmp_path)) for function in ("agent", "reward"))
    assert agent() is reward()


def test_what_has_a_name_is_referred_to_by_it(tmp_path: Path) -> None:
    assert reference_to(load_function, str(tmp_path)) == "leyden.user_code.loading:load_function"
    assert reference_to(re.compile("a").match, str(tmp_path)).endswith(".pkl")
    assert not list(tmp_path.glob("load*"))
    open_file = (tmp_path / "x").open("w")
    with open_file, pytest.raises(LoadError, match=r"`open_file` .* into its own module"):
        reference_to(lambda task: open_file.write(task), str(tmp_path))


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("nothing", "write module:name or path/to/file.py:name"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("no_such_file.py:f", "there is no file"),
        ("no_such_file.pkl", "there is no file"),
        ("broken.py:f", r"cannot be imported: ZeroDivisionError: division by zero \(broken.py:2\)"),
        ("needs.py:f", "cannot be imported: ModuleNotFoundError: No module named 'not_installed'"),
        ("fine.py:sovle", "fine has no 'sovle': did you mean 'solve'?"),
        ("fine.py:number", "is a int, which is not callable"),
        ("fine.py:Kind", "is a class"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path: Path, reference: str, says: str) -> None:
    (tmp_path / "broken.py").write_text("a = 0\nb = 1 / a\n")
    (tmp_path / "needs.py").write_text("import not_installed\n")
    (tmp_path / "fine.py").write_text("number = 3\nclass Kind: pass\ndef solve(task): pass\n")
    with pytest.raises(LoadError, match=says) as caught:
        load_function(reference, str(tmp_path))
    assert "\n" not in str(caught.value)
