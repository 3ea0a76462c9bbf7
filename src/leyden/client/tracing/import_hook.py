"""Have something done when a module is imported, whenever that is: nothing is imported that the agent does not use."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Call `hook` with a module right after it was imported; at once where it was before."""
    if name in sys.modules:
        hook(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, hook))


class _Watch(MetaPathFinder):
    """Has a module found by whoever finds it, and its loader call the hook; once."""

    def __init__(self, name: str, hook: Hook) -> None:
        self._name, self._hook = name, hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if not isinstance(finder, _Watch))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader: Loader) -> None:
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._hook(module)

        loader.exec_module = executed  # type: ignore[method-assign]
