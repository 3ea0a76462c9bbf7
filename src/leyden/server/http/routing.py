"""Routes requests by Starlette's routes, without trying all of them.

Starlette tries routes one after another. A path is tried only on routes with as many segments and the same last
segment, or a parameter there, and on those that match any rest. Their order is kept, so the first match is the same.
"""

from collections.abc import Sequence

from starlette.routing import Match, Route
from starlette.types import ASGIApp, Scope

_REST = ":path}"


class IndexedRouter:
    """Finds the first route that matches a request's path."""

    def __init__(self, routes: Sequence[Route], default: ASGIApp) -> None:
        exact = [route for route in routes if _REST not in route.path]
        keys = {_key(route.path) for route in exact}
        depths = {depth for depth, _ in keys}
        self._routes = {
            key: [route for route in routes if _may_match(route, key)]
            for key in keys | {(depth, "") for depth in depths}
        }
        self._rest = [route for route in routes if _REST in route.path]
        self._default = default

    def find(self, scope: Scope) -> ASGIApp:
        """Return the endpoint of the route that matches, and put the parameters in the path into the scope."""
        for route in self.select(scope["path"]):
            match, found = route.matches(scope)
            if match is Match.FULL:
                scope.update(found)
                return route.app
        scope["path_params"] = {}
        return self._default

    def select(self, path: str) -> list[Route]:
        """Return the routes that can match a path."""
        depth, last = _key(path)
        return self._routes.get((depth, last)) or self._routes.get((depth, "")) or self._rest


def _key(path: str) -> tuple[int, str]:
    """Return the number of segments and the last one, "" for a parameter."""
    last = path.rpartition("/")[2]
    return path.count("/"), "" if "{" in last else last


def _may_match(route: Route, key: tuple[int, str]) -> bool:
    depth, last = _key(route.path)
    return _REST in route.path or (depth == key[0] and last in ("", key[1]))
