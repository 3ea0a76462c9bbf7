"""The table of routes. Everything beneath a run has the run in its path, which is what a key is held against."""

from leyden.episodes import Episode
from leyden.records import Call, Group, Metric, Reward, Run, Version, Worker
from leyden.server import api, otlp
from leyden.server.content import JSON
from leyden.server.gateway.routes import GATEWAY_ROUTES
from leyden.server.http import Raw, Route
from leyden.server.keys import Permission
from leyden.server.openapi import openapi_handler
from leyden.wire import (
    CancelReply,
    Counted,
    Cursor,
    EventCursor,
    EventLog,
    FinishReply,
    FinishRequest,
    GroupScoring,
    GroupSpec,
    HeartbeatReply,
    HeartbeatRequest,
    HoldReply,
    KeySpec,
    Lease,
    LeaseRequest,
    ListedRollout,
    Metrics,
    NewKey,
    Recorded,
    RolloutDetail,
    RolloutPage,
    RunSpec,
    RunSummary,
    Scores,
    ScoringHeartbeat,
    ScoringRequest,
)

_RUN = "/api/runs/{run}"
_GROUP = _RUN + "/groups/{group}"
_ROLLOUT = _RUN + "/rollouts/{rollout}"
_ATTEMPT = _RUN + "/attempts/{attempt}"

ROUTES: list[Route] = [
    Route("GET", "/healthz", None, api.health, returns=dict[str, str]),
    Route("GET", "/metrics", Permission.OVERSEE, api.metrics_page, returns=Raw, media_types=("text/plain",)),
    Route("GET", "/api/runs", Permission.SEE, api.list_runs, returns=list[RunSummary]),
    Route("POST", "/api/runs", Permission.STEER, api.create_run, body=RunSpec, returns=Run),
    Route("GET", _RUN, Permission.SEE, api.get_run, returns=Run),
    Route("DELETE", _RUN, Permission.DELETE, api.delete_run),
    Route("GET", _RUN + "/summary", Permission.SEE, api.summarise_run, returns=RunSummary),
    Route("GET", _RUN + "/events", Permission.SEE, api.follow_events, query=EventCursor, returns=EventLog, waits=True),
    Route("GET", _RUN + "/metrics", Permission.SEE, api.list_metrics, query=Cursor, returns=Metrics),
    Route("POST", _RUN + "/metrics", Permission.STEER, api.record_metrics, body=tuple[Metric, ...], returns=Recorded),
    Route("GET", _RUN + "/versions", Permission.SEE, api.list_versions, returns=list[Version]),
    Route("POST", _RUN + "/versions", Permission.STEER, api.publish_version, body=Version, returns=Recorded),
    Route("POST", _RUN + "/policies/{policy}/hold", Permission.STEER, api.hold_calls, returns=HoldReply),
    Route("POST", _RUN + "/groups", Permission.STEER, api.enqueue, body=GroupSpec, returns=Group),
    Route("GET", _GROUP, Permission.SEE, api.get_group, returns=Group),
    Route("GET", _GROUP + "/episodes", Permission.REVIEW, api.group_episodes, returns=list[Episode]),
    Route("POST", _GROUP + "/cancel", Permission.STEER, api.cancel_group, returns=CancelReply),
    Route(
        "POST",
        "/api/scorings",
        Permission.WORK,
        api.lease_scoring,
        body=ScoringRequest,
        returns=list[GroupScoring],
        waits=True,
    ),
    Route("POST", _GROUP + "/beat", Permission.WORK, api.beat_scoring, body=ScoringHeartbeat, returns=Counted),
    Route("POST", _GROUP + "/scores", Permission.WORK, api.score_group, body=Scores, returns=Counted),
    Route("GET", _RUN + "/rollouts", Permission.SEE, api.list_rollouts, query=RolloutPage, returns=list[ListedRollout]),
    Route("GET", _ROLLOUT, Permission.SEE, api.get_rollout, returns=RolloutDetail),
    Route("POST", _ROLLOUT + "/cancel", Permission.STEER, api.cancel_rollout, returns=CancelReply),
    Route("GET", _ATTEMPT, Permission.REVIEW, api.get_episode, returns=Episode),
    Route("POST", _ATTEMPT + "/calls", Permission.RECORD, api.record_calls, body=tuple[Call, ...], returns=Recorded),
    Route(
        "POST", _ATTEMPT + "/rewards", Permission.REWARD, api.record_rewards, body=tuple[Reward, ...], returns=Recorded
    ),
    Route("POST", _ATTEMPT + "/finish", Permission.WORK, api.finish, body=FinishRequest, returns=FinishReply),
    Route("POST", "/api/lease", Permission.WORK, api.lease, body=LeaseRequest, returns=list[Lease], waits=True),
    Route("GET", "/api/workers", Permission.OVERSEE, api.list_workers, returns=list[Worker]),
    Route("POST", "/api/workers/{worker}/withdraw", Permission.WORK, api.withdraw),
    Route(
        "POST", "/api/workers/{worker}/beat", Permission.WORK, api.beat, body=HeartbeatRequest, returns=HeartbeatReply
    ),
    Route("POST", "/api/keys", Permission.MINT, api.make_key, body=KeySpec, returns=NewKey),
    Route(
        "POST",
        "/v1/traces",
        Permission.TRACE,
        api.export_traces,
        body=Raw,
        returns=Raw,
        media_types=(otlp.PROTOBUF, JSON),
    ),
]
ROUTES += GATEWAY_ROUTES
ROUTES.append(Route("GET", "/openapi.json", None, openapi_handler(ROUTES), returns=Raw))
