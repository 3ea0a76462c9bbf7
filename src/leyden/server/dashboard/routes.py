"""Routes of the dashboard: its pages, which any path below shows, and the data that they fetch."""

from collections.abc import Sequence

from leyden.api.endpoint import Permission
from leyden.api.endpoints import ControlApi
from leyden.api.views import SeriesQuery
from leyden.server.control.serving import serve
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
    serve(ControlApi.overview, api.overview),
    *(
        Route(
            *("GET", path, Permission.VIEW, stream.stream_changes),
            returns=Raw,
            waits=True,
            media_types=(EVENT_STREAM,),
        )
        for path in ("/api/stream", _RUN + "/stream")
    ),
    serve(ControlApi.view_run, api.view_run),
    serve(ControlApi.run_card, api.run_card),
    serve(ControlApi.run_series, api.run_series),
    Route(
        *("GET", _RUN + "/series.csv", Permission.VIEW, api.series_csv),
        query=SeriesQuery,
        returns=Raw,
        media_types=("text/csv",),
    ),
    serve(ControlApi.run_rewards, api.run_rewards),
    serve(ControlApi.search_rollouts, api.search_rollouts),
    serve(ControlApi.facets, api.facets),
    serve(ControlApi.failures, api.failures),
    serve(ControlApi.view_rollout, api.view_rollout),
    serve(ControlApi.view_tree, api.view_tree),
    serve(ControlApi.fleet, api.fleet),
]
