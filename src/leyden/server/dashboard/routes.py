"""Routes of the dashboard: its pages, which any path below shows, and the data that they fetch."""

from collections.abc import Sequence

from leyden.api.views import (
    AttemptQuery,
    Facets,
    Failures,
    Fleet,
    PointsQuery,
    PrefixTree,
    RolloutListing,
    RolloutQuery,
    RolloutView,
    RunCard,
    RunRewards,
    Series,
    SeriesQuery,
)
from leyden.records import Run
from leyden.server.control.keys import Permission
from leyden.server.dashboard import api, pages, stream
from leyden.server.http.responses import Raw, Route
from leyden.server.http.streaming import EVENT_STREAM

_RUN = "/api/runs/{run}"
_PAGES = {
    "/": ("runs.js", "chart.js"),
    "/workers": ("workers.js",),
    "/compare": ("compare.js", "chart.js", "config.js"),
    "/runs/{run}": ("run.js", "chart.js", "config.js"),
    "/runs/{run}/rollouts": ("rollouts.js",),
    "/runs/{run}/rollouts/{rollout}": ("rollout.js",),
}
"""The pages, with the scripts that each needs besides those of all pages."""


def _page(path: str, scripts: Sequence[str]) -> Route:
    return Route(
        *("GET", path, Permission.VIEW, pages.page(scripts)),
        query=dict[str, str],
        returns=Raw,
        media_types=("text/html",),
        error=pages.sign_in_page,
        error_type=pages.HTML,
        error_headers=pages.SECURITY_HEADERS,
    )


DASHBOARD_ROUTES: list[Route] = [
    *(_page(path, scripts) for path, scripts in _PAGES.items()),
    Route("GET", "/signin", None, pages.show_sign_in, returns=Raw, media_types=("text/html",)),
    Route("POST", "/signin", None, pages.sign_in, body=pages.SignIn, returns=Raw),
    Route("GET", "/static/{file}", None, pages.static_file, returns=Raw, media_types=("text/javascript", "text/css")),
    Route("GET", "/api/overview", Permission.VIEW, api.overview, returns=list[RunCard]),
    *(
        Route(
            *("GET", path, Permission.VIEW, stream.stream_changes),
            returns=Raw,
            waits=True,
            media_types=(EVENT_STREAM,),
        )
        for path in ("/api/stream", _RUN + "/stream")
    ),
    Route("GET", _RUN + "/view", Permission.VIEW, api.view_run, returns=Run),
    Route("GET", _RUN + "/card", Permission.VIEW, api.run_card, returns=RunCard),
    Route("GET", _RUN + "/series", Permission.VIEW, api.run_series, query=SeriesQuery, returns=dict[str, Series]),
    Route(
        *("GET", _RUN + "/series.csv", Permission.VIEW, api.series_csv),
        query=SeriesQuery,
        returns=Raw,
        media_types=("text/csv",),
    ),
    Route("GET", _RUN + "/rewards", Permission.VIEW, api.run_rewards, query=PointsQuery, returns=RunRewards),
    Route("GET", _RUN + "/search", Permission.VIEW, api.search_rollouts, query=RolloutQuery, returns=RolloutListing),
    Route("GET", _RUN + "/facets", Permission.VIEW, api.facets, returns=Facets),
    Route("GET", _RUN + "/failures", Permission.VIEW, api.failures, returns=Failures),
    Route(
        *("GET", _RUN + "/rollouts/{rollout}/view", Permission.VIEW, api.view_rollout),
        query=AttemptQuery,
        returns=RolloutView,
    ),
    Route("GET", _RUN + "/groups/{group}/tree", Permission.VIEW, api.view_tree, returns=PrefixTree),
    Route("GET", "/api/fleet", Permission.READ_ALL, api.fleet, returns=Fleet),
]
