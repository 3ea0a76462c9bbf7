"""A pool: so many of something costly, started once, one lent at a time to each who asks, and the dead replaced."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from leyden.client.attempt.errors import describe
from leyden.loading import LoadError

_log = logging.getLogger("leyden.worker")
_TRIES, _FIRST_PAUSE_S = 3, 0.5
_HEALTH_S, _CLOSE_S = 10.0, 10.0


class ServiceFailed(LoadError):
    """A service cannot be started: a failure of the machinery, not of what the model did."""


class Service(Protocol):
    """One of them."""

    @property
    def lent(self) -> Any:
        """What the borrower is given."""

    async def healthy(self) -> bool:
        """Whether it can be lent; an error means no."""

    async def close(self) -> None:
        """End it."""


class ServicePool:
    """Has `count` places; in each is a service, or none where it died and its replacement is not started yet."""

    def __init__(self, name: str, count: int, start: Callable[[], Awaitable[Service]]) -> None:
        self._name, self.count, self._start = name, count, start
        self._free: asyncio.LifoQueue[Service | None] = asyncio.LifoQueue()

    async def open(self) -> None:
        """Start all of them; raises `ServiceFailed` where one cannot be."""
        starting = (self._insist() for _ in range(self.count))
        errors = []
        for started in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(started, BaseException):
                errors.append(started)
            else:
                self._free.put_nowait(started)
        if errors:
            await self.close()
            raise errors[0]

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Any]:
        """One that nobody else has and that is well, as soon as there is one; raises `ServiceFailed`."""
        service = await self._free.get()
        try:
            if service is not None and not await self._is_well(service):
                dead, service = service, None
                _log.warning("a service %r is not well: another takes its place", self._name)
                await self._close(dead)
            if service is None:
                service = await self._insist()
            yield service.lent
        finally:
            self._free.put_nowait(service)

    async def close(self) -> None:
        """End those that are not lent."""
        idle = [self._free.get_nowait() for _ in range(self._free.qsize())]
        await asyncio.gather(*(self._close(service) for service in idle if service is not None))

    async def _insist(self) -> Service:
        pause = _FIRST_PAUSE_S
        for left in reversed(range(_TRIES)):
            try:
                return await self._start()
            except Exception as error:
                if not left:
                    why = str(error) if isinstance(error, ServiceFailed) else describe(error)
                    raise ServiceFailed(f"service {self._name!r} cannot be started: {why}") from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("the last try raises")

    async def _is_well(self, service: Service) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_S):
                return await service.healthy()
        except Exception as error:
            _log.warning("a service %r cannot say that it is well: %s", self._name, error)
            return False

    async def _close(self, service: Service) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await service.close()
        except Exception as error:
            _log.warning("a service %r could not be closed: %s", self._name, error)
