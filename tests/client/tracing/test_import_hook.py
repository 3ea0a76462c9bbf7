"""Hooks run when a module is imported, once, and not before."""

import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest

from leyden.client.tracing.propagation import when_imported


@pytest.fixture(autouse=True)
def finders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no finder behind."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])


def test_a_hook_waits_for_its_module_and_sees_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    seen: list[ModuleType] = []
    when_imported("waited_for", seen.append)
    assert not seen
    module = importlib.import_module("waited_for")
    assert seen == [module] and module.value == 1
    importlib.reload(module)
    assert seen == [module]
    when_imported("waited_for", seen.append)
    assert seen == [module, module]


def test_a_module_that_does_not_exist_is_still_missing() -> None:
    when_imported("there_is_no_such_module", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("there_is_no_such_module")


def test_a_hook_that_runs_while_another_thread_imports_does_not_make_that_import_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("hooked_meanwhile", "sought"):
        (tmp_path / f"{name}.py").touch()

    class Meanwhile(MetaPathFinder):
        """Lets the hook run between two finders that are asked for the module that is sought."""

        def find_spec(self, fullname: str, path: object, target: object = None) -> None:
            if fullname == "sought":
                importlib.import_module("hooked_meanwhile")

    sys.meta_path.insert(sys.meta_path.index(PathFinder), Meanwhile())
    seen: list[str] = []
    when_imported("hooked_meanwhile", lambda module: seen.append(module.__name__))
    importlib.import_module("sought")
    assert seen == ["hooked_meanwhile"]
