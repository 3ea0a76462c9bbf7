"""The index of routes selects what Starlette selects by trying every route."""

from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route, Router

from leyden.server.control.routes import ROUTES
from leyden.server.http.app import _match_order
from leyden.server.http.routing import IndexedRouter


async def answer(_: Request) -> Response:
    return PlainTextResponse("")


PATHS = list(dict.fromkeys(route.path for route in sorted(ROUTES, key=_match_order)))
ALL = [Route(path, answer, methods=["GET"]) for path in PATHS]
INDEX = IndexedRouter(ALL, default=Router())
SEGMENTS = sorted({segment for path in PATHS for segment in path.split("/")} | {"a.b", "x y", "{", "é", ""})


def first_match(routes: list[Route], path: str) -> str | None:
    scope = {"type": "http", "path": path, "method": "GET"}
    return next((route.path for route in routes if route.matches(scope)[0] is Match.FULL), None)


def tried(path: str) -> list[Route]:
    return INDEX.select(path)


@given(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=8))
def test_any_path_has_the_same_route(segments: list[str]) -> None:
    path = "/" + "/".join(segments)
    assert first_match(tried(path), path) == first_match(ALL, path)


def test_every_route_is_found_and_few_are_tried() -> None:
    for route in PATHS:
        path = "/".join("x" if segment.startswith("{") else segment for segment in route.split("/"))
        assert first_match(tried(path), path) == first_match(ALL, path) is not None
        assert len(tried(path)) < len(PATHS) / 4
