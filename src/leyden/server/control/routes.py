"""The table of routes: the declared endpoints, each with what answers it, and routes of raw content."""

from leyden.api.endpoint import Permission
from leyden.api.endpoints import ControlApi
from leyden.api.wire import CancelReply, Recorded
from leyden.server.control import api, otlp
from leyden.server.control.openapi import openapi_handler
from leyden.server.control.serving import serve, serve_count, serve_query, serve_store
from leyden.server.dashboard.routes import DASHBOARD_ROUTES
from leyden.server.gateway.routes import GATEWAY_ROUTES
from leyden.server.http.content import JSON
from leyden.server.http.responses import Raw, Route
from leyden.store.read import queries
from leyden.store.store import Store

ROUTES: list[Route] = [
    serve(ControlApi.health, api.health),
    Route("GET", "/metrics", Permission.READ_ALL, api.metrics_page, returns=Raw, media_types=("text/plain",)),
    serve(ControlApi.list_runs, api.list_runs),
    serve_store(ControlApi.create_run, Store.create_run),
    serve_query(ControlApi.get_run, queries.get_run),
    serve_store(ControlApi.delete_run, Store.delete_run),
    serve_query(ControlApi.summarise_run, queries.summarise_run),
    serve_store(ControlApi.follow_events, Store.events),
    serve(ControlApi.list_metrics, api.list_metrics),
    serve_count(ControlApi.record_metrics, Store.record_metrics, Recorded),
    serve_count(ControlApi.record_credits, Store.record_credits, Recorded),
    serve_query(ControlApi.list_versions, queries.latest_versions),
    serve(ControlApi.publish_version, api.publish_version),
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
