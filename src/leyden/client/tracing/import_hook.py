"""Runs hooks right after a module is imported, so that libraries the agent does not use are never imported."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Call `hook` with a module right after its import, or now if it is already imported."""
    if name in sys.modules:
        hook(sys.modules[name])
    else:
        sys.meta_path.insert(0, _HookFinder(name, hook))


class _HookFinder(MetaPathFinder):
    """Delegates to the other finders and wraps the loader they find, so that it calls the hook once."""

    def __init__(self, name: str, hook: Hook) -> None:
        self._name, self._hook = name, hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        found = (
            finder.find_spec(fullname, path, target) for finder in sys.meta_path if not isinstance(finder, _HookFinder)
        )
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: Loader) -> None:
        exec_module = loader.exec_module

        def exec_and_call_hook(module: ModuleType) -> None:
            exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._hook(module)

        loader.exec_module = exec_and_call_hook  # type: ignore[method-assign]  # only this instance
