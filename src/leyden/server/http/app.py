"""The server as an ASGI application over the table of routes.

Every request is matched to its route, authenticated, counted against its key's limits, decoded, handled and answered.
"""

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from secrets import token_hex
from types import TracebackType
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs, urlsplit

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from leyden.api.endpoint import Permission
from leyden.server.control.keys import TRUSTED_KINDS, Key, KeyKind, KeyRefused, check_permission
from leyden.server.control.routes import ROUTES
from leyden.server.gateway.errors import GatewayError
from leyden.server.gateway.routes import base_url_hint, unrouted_error
from leyden.server.http.address import is_loopback
from leyden.server.http.content import JSON, check_path, check_values, decode, decode_query, encode, read_body
from leyden.server.http.errors import ApiError, ErrorBody, ErrorDetail, api_error
from leyden.server.http.limits import BodyReservation
from leyden.server.http.responses import REQUEST_ID_HEADERS, Raw, Request, Route
from leyden.server.service import ServerContext
from leyden.store.errors import StoreUnavailable

T = TypeVar("T")

_log = logging.getLogger("leyden.server")
_REST = ":path}"
_ANONYMOUS = Key(KeyKind.VIEWER, "anonymous", float("inf"))
_LOCAL_CLIENT = Key(KeyKind.CLIENT, "local", float("inf"))
_KEYLESS = Key(KeyKind.ADMIN, "keyless", float("inf"))
_DISCONNECTED = 499
"""The status in the metrics of a request whose client disconnected before it was answered."""


def application(service: ServerContext) -> ASGIApp:
    """Build the application."""
    by_path: dict[str, list[Route]] = {}
    for route in sorted(ROUTES, key=_match_order):
        by_path.setdefault(route.path, []).append(route)
    index = PathIndex({path: PathHandler(service, path, routes) for path, routes in by_path.items()})
    unknown = PathHandler(service, "none", ())

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = scope["path"].rstrip("/") or "/"  # a slash at the end changes nothing
        handler, scope["path_params"] = index.find(scope["path"]) or (unknown, {})
        await handler(scope, receive, send)

    return app


def _match_order(route: Route) -> tuple[bool, int, bool, int]:
    """Routes are tried in order: the more a path matches, the later it comes, and the busiest paths first."""
    path = route.path
    return _REST in path, path.count("{"), not path.startswith("/v1/"), -len(path)


class PathIndex(Generic[T]):
    """Finds the first path that matches, among those with as many segments and those that match any rest."""

    def __init__(self, paths: Mapping[str, T]) -> None:
        """`paths` are in Starlette's syntax: `{name}` matches one segment, `{name:path}` all that follow."""
        patterns = {path: _pattern(path) for path in paths}
        self._rest = [(patterns[path], found) for path, found in paths.items() if _REST in path]
        self._tried = {
            depth: [
                (patterns[path], found) for path, found in paths.items() if _REST in path or path.count("/") == depth
            ]
            for depth in {path.count("/") for path in paths}
        }

    def find(self, path: str) -> tuple[T, dict[str, str]] | None:
        """Return what is at a path, with the parameters in it."""
        for pattern, found in self._tried.get(path.count("/"), self._rest):
            if (match := pattern.fullmatch(path)) is not None:
                return found, match.groupdict()
        return None


def _pattern(path: str) -> re.Pattern[str]:
    one_segment = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path))
    return re.compile(re.sub(r"\\{(\w+):path\\}", r"(?P<\1>.*)", one_segment))


class PathHandler:
    """Answers all requests for one path; an ASGI application."""

    def __init__(self, service: ServerContext, path: str, routes: Iterable[Route]) -> None:
        self._service = service
        self._path = path
        self._routes = {route.method: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. The request counts against the limits of its key until its response is sent."""
        started = time.perf_counter()
        route = self._routes.get(scope["method"])
        written_like = route or next((other for other in self._routes.values() if other.request_ids), None)
        request = f"req_{token_hex(12)}" if written_like is not None and written_like.request_ids else ""
        status = _DISCONNECTED
        with ExitStack() as admission:
            try:
                response = await self._respond(route, scope, receive, admission)
            except Exception as error:
                response = self._refuse(written_like, scope, error, request)
            for name in REQUEST_ID_HEADERS if request else ():
                response.headers.setdefault(name, request)
            status = response.status_code
            await response(scope, receive, send)
        if status == _DISCONNECTED:
            self._service.telemetry.refused.labels("disconnected").inc()
        self._service.telemetry.record_response(self._path, status, time.perf_counter() - started)

    async def _respond(self, route: Route | None, scope: Scope, receive: Receive, admission: ExitStack) -> Response:
        if route is None:
            raise self._not_allowed(scope) if self._routes else _not_found(scope)
        service, path = self._service, scope["path_params"]
        headers = _headers(scope)
        key = _ANONYMOUS
        if route.permission is not None:
            key = self._authenticate(route.permission, path, _given_key(route, scope, headers), headers)
            if (connection := scope.get("state", {}).get("connection")) is not None:
                connection.holds_key(key)
            admission.enter_context(service.limiter.admit(key.kind, key.id))
        check_path(path)
        query = decode_query(scope["query_string"], route.query)
        body: Any = None
        if route.body is not None or route.waits:
            with service.bodies.receiving(key.id) as reservation:
                body = await self._read(route, key, headers, receive, reservation)
        if route.waits:
            admission.enter_context(CancelOnDisconnect(receive))
        answer = await route.handler(service, Request(path, query, body, key, headers))
        return _response(route, answer, headers.get("accept", ""))

    async def _read(
        self, route: Route, key: Key, headers: Mapping[str, str], receive: Receive, reservation: BodyReservation
    ) -> Any:
        """Read the body and decode it to the type that the route names."""
        data = await read_body(headers, receive, self._service.options.max_body, reservation)
        content_type = headers.get("content-type", "")
        if route.takes_json and key.kind not in TRUSTED_KINDS:
            # Dialects decode a raw body as JSON, whatever its header says.
            await check_values(data, JSON if route.body is Raw else content_type)
        if route.body is Raw:
            return Raw(data, content_type)
        return None if route.body is None else decode(data, content_type, route.body)

    def _authenticate(self, permission: Permission, path: dict[str, str], text: str, headers: Mapping[str, str]) -> Key:
        cookie = "" if text else _cookie(headers.get("cookie", ""), self._service.keyring.cookie)
        if not text and not cookie:
            if self._service.options.keyless and permission is not Permission.VIEW and _is_local(headers):
                return _KEYLESS
            if self._may_call_directly(permission, headers):
                return _LOCAL_CLIENT
            raise KeyRefused("no key: send one as `Authorization: Bearer ...`", "invalid_api_key", 401)
        try:
            key = self._service.keyring.verify(text or cookie)
        except KeyRefused:
            if self._may_call_directly(permission, headers):  # SDKs require a key, so any key is accepted
                return _LOCAL_CLIENT
            raise
        if cookie and key.kind is not KeyKind.VIEWER:  # another site could make a browser send it
            raise KeyRefused("a cookie can hold a viewer's key only", "invalid_api_key", 401)
        check_permission(key, permission, self._service.leases, run=path.get("run"), attempt=path.get("attempt"))
        return key

    def _may_call_directly(self, permission: Permission, headers: Mapping[str, str]) -> bool:
        """Whether a request without a valid key may call a model: on loopback, if models are served directly."""
        options = self._service.options
        may = permission is Permission.CALL_MODELS and options.direct and is_loopback(options.server.host)
        return may and _is_local(headers)

    def _not_allowed(self, scope: Scope) -> ApiError:
        allowed = ", ".join(sorted(self._routes))
        message = f"{scope['path']} takes {allowed}"
        return ApiError(405, "method_not_allowed", message, headers=[("allow", allowed)])

    def _refuse(self, route: Route | None, scope: Scope, exception: Exception, request: str) -> Response:
        error = api_error(exception)
        if error.status < 500:
            self._service.telemetry.refused.labels(error.reason).inc()
        elif isinstance(exception, GatewayError):  # an engine or an upstream failed, not this server
            _log.warning("%s %s failed (%s): %s", scope["method"], scope["path"], request, error.message)
        elif not isinstance(exception, StoreUnavailable):  # the store logs it once for all requests
            _log.exception("%s %s failed %s", scope["method"], scope["path"], request, exc_info=exception)
        content_type, sent = JSON, _headers(scope)
        body = unrouted_error(error, scope["path"], sent) if route is None else None
        if route is not None and route.error is not None:
            body, content_type = route.error(error, sent), route.error_type
        if body is None:
            body = encode(ErrorBody(ErrorDetail(error.reason, error.message, error.field)), JSON)[0]
        headers = {**dict(error.headers), **dict(route.error_headers if route is not None else ())}
        return Response(body, error.status, headers, content_type)


def _given_key(route: Route, scope: Scope, headers: Mapping[str, str]) -> str:
    """Return the key of a request, which each API sends in a place of its own; "" if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if key := headers.get("x-api-key") or headers.get("x-goog-api-key"):
        return key
    return parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0] if route.key_in_query else ""


def _cookie(header: str, name: str) -> str:
    """Return the value of a cookie, "" if there is none. Keys need no unquoting, which can take Python a minute."""
    pairs = (part.partition("=") for part in header.split(";"))
    return next((value.strip() for key, _, value in pairs if key.strip() == name), "")


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def _not_found(scope: Scope) -> ApiError:
    return ApiError(404, "not_found", f"there is nothing at {scope['path']}{base_url_hint(scope['path'])}")


def _is_local(headers: Mapping[str, str]) -> bool:
    """Whether a request was sent to a loopback address, and not by a web page of another site."""
    host, origin = headers.get("host", ""), headers.get("origin")
    try:
        return is_loopback(urlsplit(f"//{host}").hostname) and (
            origin is None or is_loopback(urlsplit(origin).hostname)
        )
    except ValueError:  # not a URL
        return False


def _response(route: Route, answer: Any, accept: str) -> Response:
    if isinstance(answer, Response):
        return answer
    if isinstance(answer, Raw):
        return Response(answer.content, headers={**dict(answer.headers), "content-type": answer.content_type})
    if route.returns is None:
        return Response(status_code=204)
    content, content_type = encode(answer, accept)
    return Response(content, media_type=content_type)


class CancelOnDisconnect:
    """A context whose task is cancelled when the client disconnects; the cancellation ends with the context.

    The body must have been read: the only message after it is the disconnect.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[None] | None = None
        self._disconnected = False

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._receiving: asyncio.Future[Message] = asyncio.ensure_future(self._receive())
        self._receiving.add_done_callback(self._cancel)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        self._receiving.cancel()
        if not self._disconnected or task is None:
            return False
        return task.uncancel() == 0 and kind is asyncio.CancelledError

    def _cancel(self, _: object) -> None:
        if self._task is not None:
            self._disconnected = True
            self._task.cancel()
