"""Routes requests by Starlette's routes, without trying all of them.

Starlette tries routes one after another. A path is tried only on routes with as many segments and the same last
segment, or a parameter there, and on those that match any rest. Their order is kept, so the first match is the same.
"""

from collections.abc import Sequence

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

_REST = ":path}"


class IndexedRouter:
    """Routes a request to the first route that matches its path; an ASGI application."""

    def __init__(self, routes: Sequence[Route], default: ASGIApp) -> None:
        exact = [route for route in routes if _REST not in route.path]
        keys = {_key(route.path) for route in exact}
        depths = {depth for depth, _ in keys}
        self._routers = {
            key: _router([route for route in routes if _may_match(route, key)], default)
            for key in keys | {(depth, "") for depth in depths}
        }
        self._rest = _router([route for route in routes if _REST in route.path], default)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the route that matches."""
        await self.select(scope["path"])(scope, receive, send)

    def select(self, path: str) -> Router:
        """Return the router with all routes that can match a path."""
        depth, last = _key(path)
        return self._routers.get((depth, last)) or self._routers.get((depth, "")) or self._rest


def _router(routes: Sequence[Route], default: ASGIApp) -> Router:
    return Router(routes, redirect_slashes=False, default=default)


def _key(path: str) -> tuple[int, str]:
    """Return the number of segments and the last one, "" for a parameter."""
    last = path.rpartition("/")[2]
    return path.count("/"), "" if "{" in last else last


def _may_match(route: Route, key: tuple[int, str]) -> bool:
    depth, last = _key(route.path)
    return _REST in route.path or (depth == key[0] and last in ("", key[1]))
