"""Starts a server from a home folder, and stops it without losing accepted requests."""

import asyncio
import faulthandler
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from leyden.api.wire import MAX_KEY_TTL_S
from leyden.background import start_background
from leyden.process.resources import raise_file_limit
from leyden.server.control.engine_reports import writing_reports
from leyden.server.control.keys import KeyKind, KeyRefused, Keyring, write_private
from leyden.server.gateway.gateway import Gateway
from leyden.server.gateway.served_model import ServedModel
from leyden.server.http.address import bind_port, is_loopback, is_wildcard
from leyden.server.http.app import application
from leyden.server.http.connections import KEEP_ALIVE_S, ConnectionLimits
from leyden.server.loop_watchdog import LoopWatchdog
from leyden.server.options import RunningServer, ServeError, ServeOptions
from leyden.server.service import ServerContext
from leyden.store.store import Store

if TYPE_CHECKING:
    from leyden.server.gateway.upstream.client import UpstreamClient

_log = logging.getLogger("leyden.server")
_SHUTDOWN_S = 30
_RECORDING_S = 5.0
"""How long requests that are cut off have to record that."""
_MONTH = 30 * 86_400.0
_GRACE_S = 60.0
"""How long a server may take to stop: it gives requests half a minute."""
_BLOCKED_CPU_S, _TICK_S = 60.0, 1.0
_SWITCH_S = 0.001
"""How long the event loop waits for a thread that computes; Python's 5 ms add up over the steps of a call."""
_GC_THRESHOLD = 20_000
"""New objects between two collections, in place of 700: most objects of a call are freed before one looks at them."""


async def serve(
    options: ServeOptions, started: Callable[[RunningServer], None], models: Sequence[ServedModel] = ()
) -> None:
    """Serve until SIGINT or SIGTERM, then finish accepted requests; a second signal stops at once."""
    async with open_server(options, models) as server:
        with ending_process(server.stop):
            started(server.running)
            await server.stopped


@asynccontextmanager
async def open_server(
    options: ServeOptions, models: Sequence[ServedModel] = (), release: str | None = None, park: str | None = None
) -> AsyncIterator["Server"]:
    """Run a server within a context; accepted requests are finished when the context is left.

    It serves these models and the upstream of the options. With `release`, it ends all active attempts with this
    message, uncharged, before it accepts a request; with `park`, it parks the rollouts of this run. If its store is
    lost, it stops at once, and the end of the context raises `StoreLost`.
    """
    if options.keyless and not is_loopback(options.server.host):
        raise ServeError(
            f"--keyless on {options.server.host} would admit everybody: drop --keyless, or listen on 127.0.0.1 only"
        )
    if options.server.advertise is None and is_wildcard(options.server.host):
        raise ServeError(
            f"workers cannot use the address {options.server.host}: set their URL with --advertise (server.advertise)"
        )
    raise_file_limit()
    with bind_port(options.server.host, options.server.port) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        store = await Store(options.location, create=options.create).start()
        background = [
            start_background(store.expire_loop(), "the expiry of leases"),
            start_background(store.watch(), "the watch over the store"),
        ]
        try:
            if release is not None:
                await store.release_all(release)
            if park is not None:
                await store.park(park)
            keyring = _keyring(options.home / "secret")
            admin_key = _ensure_key(keyring, KeyKind.ADMIN, options.home / "admin.key")
            if options.direct:
                _ensure_key(keyring, KeyKind.CLIENT, options.home / "client.key")
            service = await ServerContext.start(store, keyring, options, options.server.advertise or url)
            upstream = _upstream(options)
            if models or upstream:
                service.gateway = Gateway(store, service.leases, {model.name: model for model in models}, upstream)
            gc.collect()
            gc.freeze()  # imported modules live as long as the server, so collections need not scan them
            gc.set_threshold(_GC_THRESHOLD)
            sys.setswitchinterval(_SWITCH_S)
            link = f"{service.url}/signin#key={keyring.create(KeyKind.VIEWER, _MONTH)[0]}"
            server = Server(service, RunningServer(url, service.url, store.database.name, str(admin_key), link))
            await server.listen(listener)
            try:
                (options.home / "url").write_text(url + "\n")  # by which commands find the server of this home folder
                async with LoopWatchdog(service.telemetry.registry), writing_reports(service, options.home):
                    yield server
            finally:
                server.stop()
                await server.stopped
                await server.cut_requests()
                await service.close()
        finally:
            for task in background:
                task.cancel()
            await store.close()
    if store.lost.done():
        raise store.lost.result()


class Server(uvicorn.Server):
    """A uvicorn server that is started and stopped by methods, not by signals."""

    def __init__(self, service: ServerContext, running: RunningServer) -> None:
        super().__init__(
            uvicorn.Config(
                application(service),
                http=ConnectionLimits(service.limiter.limits).protocol,  # type: ignore[arg-type]  # called like a class
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=4096,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_SHUTDOWN_S,
            )
        )
        self.running = running
        self.stopped: asyncio.Task[None]
        """Done when accepted requests are finished."""
        self.service = service
        self._listening, self._stopping = asyncio.Event(), asyncio.Event()
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
        logging.getLogger("uvicorn.access").disabled = True  # URLs may have keys

    async def listen(self, listener: socket.socket) -> None:
        """Start listening. A server whose store is lost stops at once: it could not keep what it is told."""
        self.service.store.lost.add_done_callback(lambda _: self.drop())
        self.stopped = asyncio.create_task(self.serve(sockets=[listener]))
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait({self.stopped, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not self._listening.is_set():
            listening.cancel()
            self.stopped.result()

    def stop(self) -> None:
        """Accept no more requests; called again, drop unfinished ones."""
        self.service.store.stop_waiting()  # requests that only wait are answered now
        self.handle_exit(signal.SIGINT, None)
        self._stopping.set()

    def drop(self) -> None:
        """Stop without waiting for unfinished requests."""
        self.stop()
        self.stop()

    async def cut_requests(self) -> None:
        """Cancel the requests that were not finished in time, and let them record that."""
        tasks = set(self.server_state.tasks)
        if not tasks:
            return
        _log.warning("%d requests are cut off, because the server stops", len(tasks))
        for task in tasks:
            if not task.cancelling():  # uvicorn cancels them if the first signal's time is over
                task.cancel()
        await asyncio.wait(tasks, timeout=_RECORDING_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn; marks the server as listening."""
        await super().startup(sockets)
        self._listening.set()

    async def main_loop(self) -> None:
        """Called by uvicorn; waits for `stop`, for which uvicorn's own would look ten times a second."""
        await self._stopping.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signal handlers to the caller."""
        yield


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Leave the requests that are cut off when a server stops out of the log: uvicorn logs the stack of each."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def _upstream(options: ServeOptions) -> "UpstreamClient | None":
    """Return the client of the upstream, if the options name one."""
    if options.upstream.url is None:
        return None
    from leyden.server.gateway.upstream.client import UpstreamClient  # aiohttp is slow to import

    return UpstreamClient(options.upstream.url, options.upstream_key, options.upstream.timeout_s)


def _keyring(path: Path) -> Keyring:
    try:
        return Keyring.from_file(path, time.time)
    except ValueError as error:
        raise ServeError(str(error)) from error


def _ensure_key(keyring: Keyring, kind: KeyKind, path: Path) -> Path:
    """Return a file with a key of this kind; the key is created if it is missing or invalid."""
    try:
        keyring.verify(path.read_text().strip())
    except (FileNotFoundError, UnicodeDecodeError, KeyRefused):
        write_private(path, keyring.create(kind, MAX_KEY_TTL_S)[0])
    return path


@contextmanager
def ending_process(stop: Callable[[], None]) -> Iterator[None]:
    """Within this context of a running loop, SIGINT and SIGTERM call `stop`, and a blocked loop ends the process.

    A signal stops the server gracefully; if that takes over a minute, the process exits. The kernel kills a process
    that used a minute of CPU time while its loop did not run once, whatever it computes and whoever holds the GIL. CPU
    time does not pass while the process is stopped or the machine is busy with others or sleeps. Both write to the log
    what the server was doing.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.Handle

    def on_signal(*_: object) -> None:  # runs between two instructions, also if the loop is blocked
        faulthandler.dump_traceback_later(_GRACE_S, exit=True)
        loop.call_soon_threadsafe(stop)

    def tick() -> None:
        nonlocal timer
        signal.setitimer(signal.ITIMER_PROF, _BLOCKED_CPU_S)
        timer = loop.call_later(_TICK_S, tick)

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    faulthandler.register(signal.SIGPROF, chain=True)
    timer = loop.call_soon(tick)
    try:
        yield
    finally:
        timer.cancel()
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.unregister(signal.SIGPROF)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in handlers.items():
            signal.signal(number, handler)
