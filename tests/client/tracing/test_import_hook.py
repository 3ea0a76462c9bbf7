"""Hooks run when a module is imported, once, and not before."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from leyden.client.tracing.propagation import when_imported


def test_a_hook_waits_for_its_module_and_sees_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    seen: list[ModuleType] = []
    finders = len(sys.meta_path)
    when_imported("waited_for", seen.append)
    assert not seen
    module = importlib.import_module("waited_for")
    assert seen == [module] and module.value == 1
    assert len(sys.meta_path) == finders
    importlib.reload(module)
    assert seen == [module]
    when_imported("waited_for", seen.append)
    assert seen == [module, module]


def test_a_module_that_does_not_exist_is_still_missing() -> None:
    when_imported("there_is_no_such_module", lambda _: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("there_is_no_such_module")
