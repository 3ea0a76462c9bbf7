"""How identity leaves the context it was set in: with requests to our server, into threads, and into processes.

The hooks are our own. OpenTelemetry's instrumentations may stand beside them but could not replace them: they send
nothing where a framework suppresses tracing, and they would tell every other server which attempt is calling.
"""

import functools
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context

from leyden.client.tracing import latest_call
from leyden.client.tracing.context import current_attempt, sign
from leyden.client.tracing.import_hook import when_imported

CALL_HEADER = "x-leyden-call"
"""In which the server says under what id a call is in the record."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PORTS = {"http": 80, "https": 443}


class ServerOrigin:
    """A server's scheme, host and port. The names of loopback are one."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._origin = _normal(parts.scheme, parts.hostname or "", parts.port)

    def has(self, scheme: str, host: str | None, port: int | None) -> bool:
        """Whether these are the same."""
        return _normal(scheme, host or "", port) == self._origin


def _normal(scheme: str, host: str, port: int | None) -> tuple[str, str, int | None]:
    host = host.lower().strip("[]")
    return scheme, "localhost" if host in _LOOPBACK else host, port or _PORTS.get(scheme)


def install(server: str) -> None:
    """Hook into this process; before the agent's modules are imported, which may keep what they find."""
    ours = ServerOrigin(server)
    hooks = {"httpx": _hook_httpx, "httpx2": _hook_httpx, "urllib3": _hook_urllib3, "aiohttp": _hook_aiohttp}
    for name, hook in hooks.items():
        when_imported(name, functools.partial(hook, ours))
    _carry_into_threads()
    _carry_into_pools()
    _carry_into_processes()


def _note(headers: Mapping[str, str]) -> None:
    call = headers.get(CALL_HEADER)
    if call is not None:
        latest_call.note(call)


def _hook_httpx(ours: ServerOrigin, module: ModuleType) -> None:
    send, send_async = module.Client.send, module.AsyncClient.send

    @functools.wraps(send)
    def signed(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not ours.has(request.url.scheme, request.url.host, request.url.port):
            return send(self, request, *args, **kwargs)
        sign(request.headers)
        response = send(self, request, *args, **kwargs)
        _note(response.headers)
        return response

    @functools.wraps(send_async)
    async def signed_async(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not ours.has(request.url.scheme, request.url.host, request.url.port):
            return await send_async(self, request, *args, **kwargs)
        sign(request.headers)
        response = await send_async(self, request, *args, **kwargs)
        _note(response.headers)
        return response

    module.Client.send, module.AsyncClient.send = signed, signed_async


def _hook_urllib3(ours: ServerOrigin, module: ModuleType) -> None:
    """For requests too, which stands on it."""
    urlopen = module.HTTPConnectionPool.urlopen

    @functools.wraps(urlopen)
    def signed(
        self: Any, method: str, url: str, body: Any = None, headers: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not ours.has(self.scheme, self.host, self.port):
            return urlopen(self, method, url, body, headers, *args, **kwargs)
        said = module.HTTPHeaderDict(self.headers if headers is None else headers)
        sign(said)
        response = urlopen(self, method, url, body, said, *args, **kwargs)
        _note(response.headers)
        return response

    module.HTTPConnectionPool.urlopen = signed


def _hook_aiohttp(ours: ServerOrigin, module: ModuleType) -> None:
    begin = module.ClientSession.__init__

    async def started(session: Any, about: Any, request: Any) -> None:
        if ours.has(request.url.scheme, request.url.host, request.url.port):
            sign(request.headers)

    async def answered(session: Any, about: Any, request: Any) -> None:
        if ours.has(request.url.scheme, request.url.host, request.url.port):
            _note(request.response.headers)

    watching = module.TraceConfig()
    watching.on_request_start.append(started)
    watching.on_request_end.append(answered)

    @functools.wraps(begin)
    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["trace_configs"] = [*(kwargs.get("trace_configs") or ()), watching]
        begin(self, *args, **kwargs)

    module.ClientSession.__init__ = begun


def _carry_into_threads() -> None:
    start = threading.Thread.start

    @functools.wraps(start)
    def carried(self: threading.Thread) -> None:
        if current_attempt() is not None:
            self.run = _carried(self.run)  # type: ignore[method-assign]
        start(self)

    threading.Thread.start = carried  # type: ignore[method-assign]


def _carry_into_pools() -> None:
    submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit

    @functools.wraps(submit)
    def carried(self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return submit(self, _carried(fn), *args, **kwargs)

    ThreadPoolExecutor.submit = carried  # type: ignore[method-assign,assignment]


def _carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to be run in another thread as if it were here."""
    here, strand = context.get_current(), latest_call.current.get()

    def run(*args: Any, **kwargs: Any) -> Any:
        attached, set_ = context.attach(here), latest_call.current.set(strand)
        try:
            return function(*args, **kwargs)
        finally:
            latest_call.current.reset(set_)
            context.detach(attached)

    return run


def _carry_into_processes() -> None:
    """By the variables that OpenTelemetry has for it; nothing else of a process knows of an attempt."""
    begin = subprocess.Popen.__init__

    @functools.wraps(begin)
    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        said: dict[str, str] = {}
        sign(said)
        if said and len(args) < _ENV_PLACE:
            given = kwargs.get("env")
            variables = {name.upper(): value for name, value in said.items()}
            kwargs["env"] = os.environ | variables if given is None else variables | dict(given)
        begin(self, *args, **kwargs)

    subprocess.Popen.__init__ = begun  # type: ignore[method-assign]


_ENV_PLACE = 11
"""Arguments of a Popen, given by place, with which its environment is among them."""
