"""The table of routes: the declared endpoints, each with what answers it, pages, and other routes of raw content.

mypy checks that what answers an endpoint takes and returns what the endpoint declares.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

from leyden.api.endpoint import Endpoint, Permission
from leyden.api.endpoints import ControlApi
from leyden.api.views import SeriesQuery
from leyden.api.wire import CancelReply, Recorded
from leyden.server.control import api, otlp
from leyden.server.control.keys import Key
from leyden.server.control.openapi import openapi_handler
from leyden.server.dashboard import api as dashboard
from leyden.server.dashboard import pages, stream
from leyden.server.gateway.routes import GATEWAY_ROUTES
from leyden.server.http.content import JSON
from leyden.server.http.responses import Raw, Request, Route
from leyden.server.http.streaming import EVENT_STREAM
from leyden.server.service import ServerContext
from leyden.store.read import evaluations, queries, rollout_search, task_listing, views
from leyden.store.store import Store

P = ParamSpec("P")
R = TypeVar("R")


def serve(endpoint: Endpoint[P, R], handler: Callable[Concatenate[ServerContext, Key, P], Awaitable[R]]) -> Route:
    """Answer an endpoint with a function of the server, the key of the request and its arguments."""

    answer: Callable[..., Awaitable[R]] = handler

    async def handle(service: ServerContext, request: Request[Any, Any]) -> R:
        content = request.query if endpoint.body is None else request.body
        return await answer(service, request.key, *endpoint.arguments(request.path, content))

    handle.__name__, handle.__doc__ = endpoint.name, endpoint.summary
    return Route(
        *(endpoint.method, endpoint.path, endpoint.permission, handle, endpoint.body, endpoint.query),
        returns=endpoint.returns if endpoint.returns is not type(None) else None,
        waits=endpoint.waits,
    )


def serve_query(endpoint: Endpoint[P, R], query: Callable[Concatenate[Connection, P], R]) -> Route:
    """Answer an endpoint with a query of the store."""

    async def handler(service: ServerContext, key: Key, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await service.store.read(query, *args, **kwargs)

    return serve(endpoint, handler)


def serve_run_query(
    endpoint: Endpoint[Concatenate[str, P], R], query: Callable[Concatenate[Connection, str, P], R]
) -> Route:
    """Answer an endpoint of a run with a query of the store that has the run: pages show those in other folders too."""

    async def handler(service: ServerContext, key: Key, run: str, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await service.run_stores.read(run, query, *args, **kwargs)

    return serve(endpoint, handler)


def serve_store(endpoint: Endpoint[P, R], operation: Callable[Concatenate[Store, P], Awaitable[R]]) -> Route:
    """Answer an endpoint with a method of the store."""

    async def handler(service: ServerContext, key: Key, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await operation(service.store, *args, **kwargs)

    return serve(endpoint, handler)


def serve_count(
    endpoint: Endpoint[P, R], operation: Callable[Concatenate[Store, P], Awaitable[int]], reply: Callable[[int], R]
) -> Route:
    """Answer an endpoint with the number of records that a method of the store has changed."""

    async def handler(service: ServerContext, key: Key, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return reply(await operation(service.store, *args, **kwargs))

    return serve(endpoint, handler)


_RUN = "/api/runs/{run}"
_PAGES = {
    "/": ("runs.js", "chart.js"),
    "/workers": ("workers.js",),
    "/compare": ("compare.js", "chart.js", "view.js", "config.js"),
    "/runs/{run}": ("run.js", "chart.js", "view.js", "config.js", "files.js"),
    "/runs/{run}/rollouts": ("rollouts.js", "paging.js"),
    "/runs/{run}/tasks": ("tasks.js", "paging.js"),
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
    serve(ControlApi.overview, dashboard.overview),
    *(
        Route(
            *("GET", path, Permission.VIEW, stream.stream_changes), returns=Raw, waits=True, media_types=(EVENT_STREAM,)
        )
        for path in ("/api/stream", _RUN + "/stream")
    ),
    serve(ControlApi.view_run, dashboard.view_run),
    serve(ControlApi.run_card, dashboard.run_card),
    serve(ControlApi.run_files, dashboard.run_files),
    serve_run_query(ControlApi.run_series, views.read_series),
    Route(
        *("GET", _RUN + "/series.csv", Permission.VIEW, dashboard.series_csv),
        query=SeriesQuery,
        returns=Raw,
        media_types=("text/csv",),
    ),
    serve_run_query(ControlApi.step_times, views.read_step_times),
    serve(ControlApi.run_rewards, dashboard.run_rewards),
    serve(ControlApi.compare_run, dashboard.compare_run),
    serve_run_query(ControlApi.search_rollouts, rollout_search.search_rollouts),
    serve_run_query(ControlApi.list_tasks, task_listing.list_tasks),
    serve(ControlApi.facets, dashboard.facets),
    serve_run_query(ControlApi.failures, rollout_search.failures),
    serve(ControlApi.view_rollout, dashboard.view_rollout),
    serve(ControlApi.view_tree, dashboard.view_tree),
    serve(ControlApi.fleet, dashboard.fleet),
]


ROUTES: list[Route] = [
    serve(ControlApi.health, api.health),
    Route("GET", "/metrics", Permission.READ_ALL, api.metrics_page, returns=Raw, media_types=("text/plain",)),
    serve(ControlApi.list_runs, api.list_runs),
    serve_store(ControlApi.create_run, Store.create_run),
    serve_query(ControlApi.get_run, queries.get_run),
    serve(ControlApi.run_exists, api.run_exists),
    serve_store(ControlApi.delete_run, Store.delete_run),
    serve_query(ControlApi.summarise_run, queries.summarise_run),
    serve_store(ControlApi.follow_events, Store.events),
    serve(ControlApi.list_metrics, api.list_metrics),
    serve_count(ControlApi.record_metrics, Store.record_metrics, Recorded),
    serve_count(ControlApi.record_credits, Store.record_credits, Recorded),
    serve_query(ControlApi.list_versions, queries.latest_versions),
    serve(ControlApi.publish_version, api.publish_version),
    serve(ControlApi.end_run, api.end_run),
    serve_query(ControlApi.read_evaluation, evaluations.read_evaluation),
    serve(ControlApi.get_call_times, api.get_call_times),
    serve(ControlApi.hold_calls, api.hold_calls),
    serve_store(ControlApi.enqueue, Store.enqueue),
    serve_query(ControlApi.get_group, queries.get_group),
    serve_query(ControlApi.group_episodes, queries.group_episodes),
    serve_count(ControlApi.cancel_group, Store.cancel_group, CancelReply),
    serve(ControlApi.lease_scoring, api.lease_scoring),
    serve_store(ControlApi.heartbeat_scoring, Store.heartbeat_scoring),
    serve_store(ControlApi.score_group, Store.score),
    serve_query(ControlApi.list_rollouts, queries.list_rollouts),
    serve_query(ControlApi.get_rollout, queries.get_rollout),
    serve_query(ControlApi.rollout_credits, queries.rollout_credits),
    serve_count(ControlApi.cancel_rollout, Store.cancel_rollout, CancelReply),
    serve_query(ControlApi.get_episode, queries.get_episode),
    serve_count(ControlApi.record_calls, Store.record_calls, Recorded),
    serve(ControlApi.record_rewards, api.record_rewards),
    serve(ControlApi.finish, api.finish),
    serve(ControlApi.time_out, api.time_out),
    serve(ControlApi.lease, api.lease),
    serve_query(ControlApi.list_workers, queries.list_workers),
    serve(ControlApi.withdraw, api.withdraw),
    serve(ControlApi.heartbeat, api.heartbeat),
    serve(ControlApi.create_key, api.create_key),
    Route(
        *("POST", "/v1/traces", Permission.TRACE, api.export_traces),
        body=Raw,
        returns=Raw,
        media_types=(otlp.PROTOBUF, JSON),
    ),
    *GATEWAY_ROUTES,
    *DASHBOARD_ROUTES,
]
ROUTES.append(Route("GET", "/openapi.json", None, openapi_handler(ROUTES), returns=Raw))
