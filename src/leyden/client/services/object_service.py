"""A service that is a Python object: what a class or a factory makes, in the process that uses it."""

from typing import Any

from leyden.client.user_code import Loop, in_thread
from leyden.loading import AnyCallable


class ObjectService:
    """An object that may have `healthy()`, and `close()` or `aclose()`, each sync or async."""

    def __init__(self, lent: Any, loop: Loop | None) -> None:
        self.lent, self._loop = lent, loop

    @classmethod
    async def make(cls, factory: AnyCallable, loop: Loop | None) -> "ObjectService":
        """Make one; what is async of it runs on `loop`, None: on the one that runs here."""
        return cls(await in_thread(factory, loop), loop)

    async def healthy(self) -> bool:
        """Ask it, if it can say."""
        ask = getattr(self.lent, "healthy", None)
        return ask is None or bool(await in_thread(ask, self._loop))

    async def close(self) -> None:
        """Close it, if it can be closed."""
        close = getattr(self.lent, "aclose", None) or getattr(self.lent, "close", None)
        if close is not None:
            await in_thread(close, self._loop)
