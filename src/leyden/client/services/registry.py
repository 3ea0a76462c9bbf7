"""The service pools of one process.

The worker starts commands, whose addresses any process can use. Python objects cannot leave their
process: a host has its own for its agents, and the worker has its own for the reward function.
"""

import sys
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Self

from leyden.client.services.pool import ServicePool
from leyden.client.services.process_service import ProcessService
from leyden.config.schema import ServiceConfig
from leyden.user_code.bridge import Loop, call_in_thread
from leyden.user_code.loading import AnyCallable, load_callable


def addressed_services(services: Mapping[str, ServiceConfig]) -> tuple[str, ...]:
    """Return the services whose addresses go to an agent that is a command or an endpoint."""
    return tuple(name for name, config in services.items() if config.command is not None and config.agent)


class ServiceRegistry:
    """Pools by name. An async context manager: entering starts all services, leaving ends them."""

    def __init__(self, pools: Mapping[str, ServicePool]) -> None:
        self._pools = pools

    @classmethod
    def commands(cls, services: Mapping[str, ServiceConfig], base: str) -> "ServiceRegistry":
        """Return the pools of the services that are commands."""
        started = {name: config for name, config in services.items() if config.command is not None}
        return cls(
            {name: ServicePool(name, c.count, partial(ProcessService.start, c, base)) for name, c in started.items()}
        )

    @classmethod
    def objects(
        cls,
        services: Mapping[str, ServiceConfig],
        names: Collection[str],
        base: str,
        *,
        max_count: int = sys.maxsize,
        loop: Loop | None = None,
    ) -> "ServiceRegistry":
        """Return the pools of those `names` that are Python objects, at most `max_count` of each; raises `LoadError`.

        Their async methods run on `loop`, which must be the loop of those who acquire them (None: the running one).
        """
        factories = {
            name: (min(config.count, max_count), load_callable(config.make, base))
            for name, config in services.items()
            if config.make is not None and name in names
        }
        return cls(
            {
                name: ServicePool(name, count, partial(ObjectService.start, factory, loop))
                for name, (count, factory) in factories.items()
            }
        )

    def __or__(self, others: "ServiceRegistry") -> "ServiceRegistry":
        return ServiceRegistry({**self._pools, **others._pools})

    def capacity(self) -> int | None:
        """Return how many attempts can have one of each service at the same time; None: there are no services."""
        return min((pool.count for pool in self._pools.values()), default=None)

    async def __aenter__(self) -> Self:
        """Start all services; raises `ServiceFailed` if one does not start."""
        try:
            for pool in self._pools.values():
                await pool.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all services that are not in use."""
        for pool in self._pools.values():
            await pool.close()

    @asynccontextmanager
    async def acquire(self, names: Iterable[str]) -> AsyncIterator[dict[str, Any]]:
        """Acquire one of each named service that has a pool here, and yield their handles by name.

        All wait for the pools in the same order, so that none can deadlock another.
        """
        async with AsyncExitStack() as stack:
            known = sorted(name for name in names if name in self._pools)
            yield {name: await stack.enter_async_context(self._pools[name].acquire()) for name in known}


class ObjectService:
    """An object that may have `healthy()`, and `close()` or `aclose()`, each sync or async."""

    def __init__(self, handle: Any, loop: Loop | None) -> None:
        self.handle, self._loop = handle, loop

    @classmethod
    async def start(cls, factory: AnyCallable, loop: Loop | None) -> "ObjectService":
        """Create an object; its async methods run on `loop` (None: the running one)."""
        return cls(await call_in_thread(factory, loop), loop)

    async def healthy(self) -> bool:
        """Return what its `healthy()` returns; True if it has none."""
        check = getattr(self.handle, "healthy", None)
        return check is None or bool(await call_in_thread(check, self._loop))

    async def close(self) -> None:
        """Call its `aclose()` or `close()`, if it has one."""
        close = getattr(self.handle, "aclose", None) or getattr(self.handle, "close", None)
        if close is not None:
            await call_in_thread(close, self._loop)
