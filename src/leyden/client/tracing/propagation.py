"""Propagates the attempt's context into requests to our server, into threads, and into child processes.

OpenTelemetry's own instrumentations cannot replace these hooks: they send nothing if a framework suppresses tracing,
and they would send the attempt's id to every other server.

Libraries are hooked right after their import, so that those which the agent does not use are never imported.
"""

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from opentelemetry import context

from leyden.client.server_origin import ServerOrigin
from leyden.client.tracing.context import current_attempt, current_node, inject, record_call

Hook = Callable[[ModuleType], None]
CALL_HEADER = "x-leyden-call"
"""Response header with the recorded id of the call."""


def install(server: str) -> None:
    """Install the hooks. Call it before the agent's modules are imported, which may keep references."""
    ours = ServerOrigin(server)
    hooks = {"httpx": _hook_httpx, "httpx2": _hook_httpx, "urllib3": _hook_urllib3, "aiohttp": _hook_aiohttp}
    for name, hook in hooks.items():
        when_imported(name, functools.partial(hook, ours))
    _propagate_to_threads()
    _propagate_to_executors()
    _propagate_to_processes()


def _record_call(headers: Mapping[str, str]) -> None:
    call = headers.get(CALL_HEADER)
    if call is not None:
        record_call(call)


def _hook_httpx(ours: ServerOrigin, module: ModuleType) -> None:
    send, send_async = module.Client.send, module.AsyncClient.send

    @functools.wraps(send)
    def send_with_context(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not ours.matches(request.url.scheme, request.url.host, request.url.port):
            return send(self, request, *args, **kwargs)
        inject(request.headers)
        response = send(self, request, *args, **kwargs)
        _record_call(response.headers)
        return response

    @functools.wraps(send_async)
    async def send_async_with_context(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if not ours.matches(request.url.scheme, request.url.host, request.url.port):
            return await send_async(self, request, *args, **kwargs)
        inject(request.headers)
        response = await send_async(self, request, *args, **kwargs)
        _record_call(response.headers)
        return response

    module.Client.send, module.AsyncClient.send = send_with_context, send_async_with_context


def _hook_urllib3(ours: ServerOrigin, module: ModuleType) -> None:
    """Hook urllib3, and with it requests."""
    urlopen = module.HTTPConnectionPool.urlopen

    @functools.wraps(urlopen)
    def send_with_context(
        self: Any, method: str, url: str, body: Any = None, headers: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not ours.matches(self.scheme, self.host, self.port):
            return urlopen(self, method, url, body, headers, *args, **kwargs)
        merged = module.HTTPHeaderDict(self.headers if headers is None else headers)
        inject(merged)
        response = urlopen(self, method, url, body, merged, *args, **kwargs)
        _record_call(response.headers)
        return response

    module.HTTPConnectionPool.urlopen = send_with_context


def _hook_aiohttp(ours: ServerOrigin, module: ModuleType) -> None:
    init = module.ClientSession.__init__

    async def on_start(session: Any, about: Any, request: Any) -> None:
        if ours.matches(request.url.scheme, request.url.host, request.url.port):
            inject(request.headers)

    async def on_end(session: Any, about: Any, request: Any) -> None:
        if ours.matches(request.url.scheme, request.url.host, request.url.port):
            _record_call(request.response.headers)

    tracing = module.TraceConfig()
    tracing.on_request_start.append(on_start)
    tracing.on_request_end.append(on_end)

    @functools.wraps(init)
    def init_with_context(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["trace_configs"] = [*(kwargs.get("trace_configs") or ()), tracing]
        init(self, *args, **kwargs)

    module.ClientSession.__init__ = init_with_context


def _propagate_to_threads() -> None:
    start = threading.Thread.start

    @functools.wraps(start)
    def start_with_context(self: threading.Thread) -> None:
        if current_attempt() is not None:
            self.run = _in_current_context(self.run)  # type: ignore[method-assign]  # a hook
        start(self)

    threading.Thread.start = start_with_context  # type: ignore[method-assign]  # a hook


def _propagate_to_executors() -> None:
    submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit

    @functools.wraps(submit)
    def submit_with_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        return submit(self, _in_current_context(fn), *args, **kwargs)

    ThreadPoolExecutor.submit = submit_with_context  # type: ignore[method-assign,assignment]  # a hook


def _in_current_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that another thread runs it in the current context."""
    captured, node = context.get_current(), current_node.get()

    def run(*args: Any, **kwargs: Any) -> Any:
        context_token, node_token = context.attach(captured), current_node.set(node)
        try:
            return function(*args, **kwargs)
        finally:
            current_node.reset(node_token)
            context.detach(context_token)

    return run


def _propagate_to_processes() -> None:
    """Pass the context to child processes in the environment variables that OpenTelemetry defines."""
    init = subprocess.Popen.__init__

    @functools.wraps(init)
    def init_with_context(self: Any, *args: Any, **kwargs: Any) -> None:
        carrier: dict[str, str] = {}
        inject(carrier)
        if carrier and len(args) <= _ENV_INDEX:
            env = kwargs.get("env")
            variables = {name.upper(): value for name, value in carrier.items()}
            kwargs["env"] = os.environ | variables if env is None else variables | dict(env)
        init(self, *args, **kwargs)

    subprocess.Popen.__init__ = init_with_context  # type: ignore[method-assign]  # a hook


_ENV_INDEX = 10
"""Position of `env` among the positional arguments of Popen."""


def when_imported(name: str, hook: Hook) -> None:
    """Call `hook` with a module right after its import, or now if it is already imported."""
    if name in sys.modules:
        hook(sys.modules[name])
    else:
        sys.meta_path.insert(0, _HookFinder(name, hook))


class _HookFinder(MetaPathFinder):
    """Delegates to the other finders and wraps the loader they find, so that it calls the hook once.

    It stays among the finders: if one is removed, an import of another thread skips the one behind it, and fails.
    """

    def __init__(self, name: str, hook: Hook) -> None:
        self._name: str | None = name
        self._hook = hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        found = (
            finder.find_spec(fullname, path, target) for finder in sys.meta_path if not isinstance(finder, _HookFinder)
        )
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._wrap(spec.loader)
        return spec

    def _wrap(self, loader: Loader) -> None:
        exec_module = loader.exec_module

        def exec_and_call_hook(module: ModuleType) -> None:
            exec_module(module)
            if self._name is not None:
                self._name = None
                self._hook(module)

        loader.exec_module = exec_and_call_hook  # type: ignore[method-assign]  # only this instance
