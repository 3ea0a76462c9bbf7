"""The Python API: its names, its arguments, and its errors."""

import inspect
import traceback
from pathlib import Path

import pytest

import leyden
from leyden.config import ConfigError


def test_an_evaluation_keeps_the_tasks_that_a_run_trains_on(tmp_path: Path) -> None:
    paths = {"run": "calc", "home": str(tmp_path), "base": str(tmp_path), "agent": "missing.py:solve", "held_out": 0}
    refused = pytest.raises(ConfigError, match=r"missing\.py")  # after the tasks are stored
    with refused:
        leyden.train(tasks=[{"n": 1}], **paths)
    for look in (leyden.evaluate, leyden.dev):
        with refused:
            look(tasks=[{"n": 2}], **paths)
    assert (tmp_path / "calc" / "tasks.jsonl").read_text() == '{"n": 1}\n'


def test_the_public_names_are_listed_and_have_one_style() -> None:
    functions = ("compare", "dev", "evaluate", "export", "train")
    assert {*functions, "Result", "reward", "span"} == {name for name in dir(leyden) if not name.startswith("_")}
    for name in functions:
        function = getattr(leyden, name)
        assert function.__doc__
        kinds = [one.kind for one in inspect.signature(function).parameters.values()]
        assert kinds[0] is inspect.Parameter.POSITIONAL_ONLY  # what it is about
        assert inspect.Parameter.POSITIONAL_OR_KEYWORD not in kinds


def test_an_error_comes_without_what_was_raised_before_it(tmp_path: Path) -> None:
    (tmp_path / "runs" / "calc").mkdir(parents=True)
    (tmp_path / "runs" / "calc" / "config.toml").write_text('run = "calc"\nagent = "a"\ntasks = "t"\n')
    with pytest.raises(ConfigError) as refused:
        leyden.export("other", to=tmp_path / "to", home=tmp_path / "runs")
    assert "there is no run 'other'" in str(refused.value) and "there are calc" in str(refused.value)
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        leyden.export("calc", to=tmp_path / "to", home=tmp_path / "runs")
    with pytest.raises(ConfigError) as refused:
        leyden.train(agent="a.py:solve", tasks=[{"n": 1}], held_out=0, home=str(tmp_path), base=str(tmp_path))
    assert "`agent`: " in str(refused.value)
    assert refused.value.__cause__ is None and refused.value.__context__ is None
    assert "uvloop" not in "".join(traceback.format_exception(refused.value))
