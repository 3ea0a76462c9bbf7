"""Running a server: from a home folder to a listening socket, and down again without losing what it accepted."""

import asyncio
import gc
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn

from leyden.background import start_background
from leyden.descriptors import raise_file_limit
from leyden.server.address import is_loopback, is_wildcard
from leyden.server.app import application
from leyden.server.bounded import BoundedHttp
from leyden.server.gateway.gateway import Gateway
from leyden.server.gateway.served_model import ServedModel
from leyden.server.gateway.upstream.client import UpstreamClient
from leyden.server.keys import KeyKind, KeyRefused, Keyring, write_private
from leyden.server.options import RunningServer, ServeError, ServeOptions
from leyden.server.service import ServerContext, ServerSettings
from leyden.store.store import Store

_GRACE_S = 30
_TEN_YEARS = 10 * 365 * 86_400.0


async def serve(
    options: ServeOptions, started: Callable[[RunningServer], None], policy: ServedModel | None = None
) -> None:
    """Serve until told to stop by SIGINT or SIGTERM, then finish what was accepted; told twice, stop at once."""
    async with serving(options, policy) as server:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.stop)
        started(server.running)
        await server.stopped


@asynccontextmanager
async def serving(options: ServeOptions, policy: ServedModel | None = None) -> AsyncIterator["Server"]:
    """A server that listens within this context, and has finished what it accepted when the context is left.

    A policy is served beside what its options say.
    """
    if options.keyless and not is_loopback(options.host):
        raise ServeError(
            f"--keyless on {options.host} would let anybody in: drop --keyless, or listen on 127.0.0.1 only"
        )
    if options.advertise is None and is_wildcard(options.host):
        raise ServeError(
            f"nobody reaches a server at {options.host}: say by which URL they do with --advertise, or server.advertise"
        )
    raise_file_limit()
    with _listen(options.host, options.port) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        store = await Store(options.location).start()
        sweeper = start_background(store.sweep(), "the sweeper of expired leases")
        try:
            keyring = _keyring(options.home / "secret")
            admin_key = _keep_admin_key(keyring, options.home / "admin.key")
            settings = ServerSettings(options.advertise or url, options.keyless, options.max_body_mb * 2**20)
            service = await ServerContext.start(store, keyring, settings)
            policies = {policy.name: policy} if policy is not None else {}
            upstream = _upstream(options)
            if policies or upstream:
                service.gateway = Gateway(store, policies, upstream)
            gc.collect()
            gc.freeze()  # what was imported lives as long as the server: no need to look through it again and again
            server = Server(service, RunningServer(url, settings.url, store.database.name, str(admin_key)))
            await server.listen(listener)
            (options.home / "url").write_text(url + "\n")  # by which commands find the server that has the store
            try:
                yield server
            finally:
                server.stop()
                await server.stopped
        finally:
            sweeper.cancel()
            await store.close()


class Server(uvicorn.Server):
    """A server that listens."""

    def __init__(self, service: ServerContext, running: RunningServer) -> None:
        super().__init__(
            uvicorn.Config(
                application(service),
                http=BoundedHttp,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=4096,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )
        self.running = running
        self.stopped: asyncio.Task[None]
        """Done when it has finished what it accepted."""
        self.service = service
        self._listening = asyncio.Event()

    async def listen(self, listener: socket.socket) -> None:
        """Begin to answer."""
        self.stopped = asyncio.create_task(self.serve(sockets=[listener]))
        listening = asyncio.create_task(self._listening.wait())
        await asyncio.wait({self.stopped, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not self._listening.is_set():
            listening.cancel()
            self.stopped.result()

    def stop(self) -> None:
        """Take nothing more on; called again, drop what is still being answered."""
        self.service.store.stop_waiting()  # those who only wait keep nobody waiting
        self.handle_exit(signal.SIGINT, None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Told by uvicorn to begin."""
        await super().startup(sockets)
        self._listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the business of whoever runs the server."""
        yield


def _upstream(options: ServeOptions) -> UpstreamClient | None:
    """Whatever serves the model names that are served nowhere here."""
    if options.upstream is None:
        return None
    return UpstreamClient(options.upstream, options.upstream_key, options.upstream_timeout_s)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; without it an answer takes 40 ms
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServeError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another (--port; server.port of a training)"
        ) from error
    return listener


def _keyring(path: Path) -> Keyring:
    try:
        return Keyring.from_file(path, time.time)
    except ValueError as error:
        raise ServeError(str(error)) from error


def _keep_admin_key(keyring: Keyring, path: Path) -> Path:
    """The admin key of a home folder, made anew where it is missing or no longer good."""
    try:
        keyring.read(path.read_text().strip())
    except (FileNotFoundError, KeyRefused):
        write_private(path, keyring.make(KeyKind.ADMIN, _TEN_YEARS)[0])
    return path
