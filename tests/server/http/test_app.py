"""A path leads to the route that Starlette finds by trying every route."""

from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route

from leyden.server.control.routes import ROUTES
from leyden.server.http.app import PathIndex, _match_order


async def answer(_: Request) -> Response:
    return PlainTextResponse("")


PATHS = list(dict.fromkeys(route.path for route in sorted(ROUTES, key=_match_order)))
ALL = [Route(path, answer, methods=["GET"]) for path in PATHS]
INDEX = PathIndex({path: path for path in PATHS})
SEGMENTS = sorted(
    {segment for path in PATHS for segment in path.split("/")} | {"a.b", "x y", "{", "é", "", "seriesXcsv"}
)


def first_match(path: str) -> tuple[str, dict[str, str]] | None:
    scope = {"type": "http", "path": path, "method": "GET"}
    matches = ((route.path, route.matches(scope)) for route in ALL)
    return next(((found, child["path_params"]) for found, (match, child) in matches if match is Match.FULL), None)


@given(st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=8))
def test_any_path_has_the_same_route_and_parameters(segments: list[str]) -> None:
    path = "/" + "/".join(segments)
    assert INDEX.find(path) == first_match(path)


def test_every_route_is_found() -> None:
    for route in PATHS:
        path = "/".join("x" if segment.startswith("{") else segment for segment in route.split("/"))
        assert INDEX.find(path) == first_match(path) is not None
