"""The services that one process has to lend: a database, a browser, an emulator, a grader.

Commands are the worker's, and their addresses can be lent to anybody. Python objects cannot leave their process, so a
host has its own for its agents, and the worker its own for the reward function.
"""

import sys
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Self

from leyden.client.services.object_service import ObjectService
from leyden.client.services.pool import ServicePool
from leyden.client.services.process_service import ProcessService
from leyden.client.user_code import Loop
from leyden.config.schema import ServiceConfig
from leyden.loading import load_callable


def lent_by_address(services: Mapping[str, ServiceConfig]) -> tuple[str, ...]:
    """Those that an agent is lent which cannot ask by name: a command, or an endpoint."""
    return tuple(name for name, config in services.items() if config.command is not None and config.agent)


class ServiceRegistry:
    """Pools by their names. Use it as a context manager: within, all are started, and afterwards none is left."""

    def __init__(self, pools: Mapping[str, ServicePool]) -> None:
        self._pools = pools

    @classmethod
    def commands(cls, services: Mapping[str, ServiceConfig], base: str) -> "ServiceRegistry":
        """Those that are commands."""
        started = {name: config for name, config in services.items() if config.command is not None}
        return cls(
            {name: ServicePool(name, c.count, partial(ProcessService.start, c, base)) for name, c in started.items()}
        )

    @classmethod
    def objects(
        cls,
        services: Mapping[str, ServiceConfig],
        asked: Collection[str],
        base: str,
        *,
        most: int = sys.maxsize,
        loop: Loop | None = None,
    ) -> "ServiceRegistry":
        """Those that are made here, of the ones asked for, and not more of each than `most`; raises `LoadError`.

        What is async of them runs on `loop`, where whoever is lent them runs; None: on the one that runs here.
        """
        made = {
            name: (min(config.count, most), load_callable(config.make, base))
            for name, config in services.items()
            if config.make is not None and name in asked
        }
        return cls(
            {
                name: ServicePool(name, count, partial(ObjectService.make, make, loop))
                for name, (count, make) in made.items()
            }
        )

    def __or__(self, others: "ServiceRegistry") -> "ServiceRegistry":
        return ServiceRegistry({**self._pools, **others._pools})

    def at_once(self) -> int | None:
        """How many can be lent one of each at once; None: any number, since there is nothing to lend."""
        return min((pool.count for pool in self._pools.values()), default=None)

    async def __aenter__(self) -> Self:
        """Start all; raises `ServiceFailed` where one cannot be started."""
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
        """End all that are not lent."""
        for pool in self._pools.values():
            await pool.close()

    @asynccontextmanager
    async def lend(self, names: Iterable[str]) -> AsyncIterator[dict[str, Any]]:
        """One of each that is here, when all are free; always in the same order, so that nobody waits for ever."""
        async with AsyncExitStack() as stack:
            here = sorted(name for name in names if name in self._pools)
            yield {name: await stack.enter_async_context(self._pools[name].lend()) for name in here}
