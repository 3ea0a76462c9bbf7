"""A service that is a Python object, created by a class or factory in the process that uses it."""

from typing import Any

from leyden.user_code.bridge import Loop, call_in_thread
from leyden.user_code.loading import AnyCallable


class ObjectService:
    """An object that may have `healthy()`, and `close()` or `aclose()`, each sync or async."""

    def __init__(self, handle: Any, loop: Loop | None) -> None:
        self.handle, self._loop = handle, loop

    @classmethod
    async def start(cls, factory: AnyCallable, loop: Loop | None) -> "ObjectService":
        """Create an object; its async methods run on `loop` (None: the running one)."""
        return cls(await call_in_thread(factory, loop), loop)

    async def healthy(self) -> bool:
        """Return what its `healthy()` returns; True where it has none."""
        check = getattr(self.handle, "healthy", None)
        return check is None or bool(await call_in_thread(check, self._loop))

    async def close(self) -> None:
        """Call its `aclose()` or `close()`, if it has one."""
        close = getattr(self.handle, "aclose", None) or getattr(self.handle, "close", None)
        if close is not None:
            await call_in_thread(close, self._loop)
