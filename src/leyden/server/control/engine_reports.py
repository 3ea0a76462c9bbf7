"""Reports what the engines of a server do; to other processes in a file in the server's home folder."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from msgspec.structs import replace
from sqlalchemy.exc import DBAPIError

from leyden.api.fleet import EngineReport, EngineView
from leyden.background import start_background, wait_set
from leyden.engine.router import ReplicaRouter
from leyden.server.gateway.served_model import ServedModel
from leyden.server.service import ServerContext
from leyden.store.files.engine_file import remove_report, write_report
from leyden.store.read import fleet_queries

if TYPE_CHECKING:
    from leyden.server.gateway.upstream.client import UpstreamClient

_INTERVAL_S = 1.0
_REPEAT_S = 10.0
_STOP_S = 5.0


async def report_engines(service: ServerContext) -> EngineReport:
    """Return what the server's engines do now."""
    gateway, engines = service.gateway, list[EngineView]()
    if gateway is not None:
        versions = await service.store.read(fleet_queries.newest_versions)
        engines += [_served(model, versions.get(model.name)) for model in gateway.models.values()]
        if gateway.upstream is not None:
            engines.append(_upstream(gateway.upstream))
    return EngineReport(time.time(), tuple(engines), service.telemetry.count_refused(), dict(service.worker_use))


def _served(model: ServedModel, version: int | None) -> EngineView:
    scheduler, recent = model.scheduler, model.load.recent()
    return EngineView(
        policy=model.name,
        location=model.location,
        version=version,
        slots=scheduler.slots,
        running=scheduler.running,
        waiting=scheduler.waiting,
        held=scheduler.held,
        calls=recent.calls,
        failed=recent.failed,
        tokens=recent.tokens,
        replicas=model.engine.loads if isinstance(model.engine, ReplicaRouter) else (),
    )


def _upstream(upstream: "UpstreamClient") -> EngineView:
    address, recent = urlsplit(upstream.url), upstream.load.recent()
    location = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()  # without a password
    return EngineView(
        policy=upstream.policy,
        location=location,
        version=None,
        slots=None,
        running=upstream.load.running,
        waiting=0,
        held=False,
        calls=recent.calls,
        failed=recent.failed,
        tokens=0,
    )


@asynccontextmanager
async def writing_reports(service: ServerContext, home: Path) -> AsyncIterator[None]:
    """Write the report into the home folder within this context, within a second of each change."""
    if service.gateway is None:
        yield
        return
    stop = asyncio.Event()
    writing = start_background(_write(service, home, stop), "the report of the engines")
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait({writing}, timeout=_STOP_S)  # cancelled at once, a thread that writes would leave the file
        writing.cancel()
        remove_report(home)


async def _write(service: ServerContext, home: Path, stop: asyncio.Event) -> None:
    last = EngineReport(0.0, (), {})
    while not stop.is_set():
        with suppress(OSError, DBAPIError):  # a full disk, a lost database: pages of other servers do without
            report = await report_engines(service)
            if report.at - last.at > _REPEAT_S or replace(report, at=last.at) != last:
                await asyncio.to_thread(write_report, home, report)
                last = report
        await wait_set(stop, _INTERVAL_S)
