"""A pool of equal services: started once, each used by one caller at a time, replaced when unhealthy."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from leyden.backoff import Backoff
from leyden.client.attempt.errors import describe
from leyden.user_code.loading import LoadError

_log = logging.getLogger("leyden.worker")
_START_BACKOFF, _MAX_START_TRIES = Backoff(first_s=0.5, max_s=30.0), 3
_HEALTH_TIMEOUT_S, _CLOSE_TIMEOUT_S = 10.0, 10.0


class ServiceFailed(LoadError):
    """A service cannot be started: an infrastructure failure that says nothing about the model."""


class Service(Protocol):
    """One member of a pool."""

    @property
    def handle(self) -> Any:
        """The object or the address that an attempt receives."""

    async def healthy(self) -> bool:
        """Whether it can be used; an error means no."""

    async def close(self) -> None:
        """End it."""


class ServicePool:
    """Holds `count` services. One that died is replaced when it is acquired next."""

    def __init__(self, name: str, count: int, start: Callable[[], Awaitable[Service]]) -> None:
        self._name, self.count, self._start = name, count, start
        self._free: asyncio.LifoQueue[Service | None] = asyncio.LifoQueue()
        """None: a member that died and is not replaced yet."""

    async def open(self) -> None:
        """Start all services; raises `ServiceFailed` if one does not start."""
        starting = (self._start_with_retries() for _ in range(self.count))
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
    async def acquire(self) -> AsyncIterator[Any]:
        """Wait for a healthy service that nobody else uses and yield its handle; raises `ServiceFailed`."""
        service = await self._free.get()
        try:
            if service is not None and not await self._is_healthy(service):
                unhealthy, service = service, None
                _log.warning("a service %r is unhealthy and is replaced", self._name)
                await self._close(unhealthy)
            if service is None:
                service = await self._start_with_retries()
            yield service.handle
        finally:
            self._free.put_nowait(service)

    async def close(self) -> None:
        """End the services that are not in use."""
        idle = [self._free.get_nowait() for _ in range(self._free.qsize())]
        await asyncio.gather(*(self._close(service) for service in idle if service is not None))

    async def _start_with_retries(self) -> Service:
        try:
            return await _START_BACKOFF.retry(self._start, _MAX_START_TRIES, Exception)
        except Exception as error:
            reason = str(error) if isinstance(error, ServiceFailed) else describe(error)
            raise ServiceFailed(f"service {self._name!r} cannot be started: {reason}") from error

    async def _is_healthy(self, service: Service) -> bool:
        try:
            async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                return await service.healthy()
        except Exception as error:
            _log.warning("the health check of a service %r failed: %r", self._name, error)
            return False

    async def _close(self, service: Service) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await service.close()
        except Exception as error:
            _log.warning("a service %r could not be closed: %r", self._name, error)
