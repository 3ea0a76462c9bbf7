"""The table of routes. Every path that concerns a run contains its id, against which keys are checked."""

from leyden.api.wire import (
    CallTimes,
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
    TimeoutReply,
    TimeoutRequest,
)
from leyden.episodes import Episode
from leyden.records import Call, Group, Metric, Reward, Run, StepCredits, Version, Worker
from leyden.server.control import api, otlp
from leyden.server.control.keys import Permission
from leyden.server.control.openapi import openapi_handler
from leyden.server.dashboard.routes import DASHBOARD_ROUTES
from leyden.server.gateway.routes import GATEWAY_ROUTES
from leyden.server.http.content import JSON
from leyden.server.http.responses import Raw, Route

_RUN = "/api/runs/{run}"
_GROUP = _RUN + "/groups/{group}"
_ROLLOUT = _RUN + "/rollouts/{rollout}"
_ATTEMPT = _RUN + "/attempts/{attempt}"

ROUTES: list[Route] = [
    Route("GET", "/healthz", None, api.health, returns=dict[str, str]),
    Route("GET", "/metrics", Permission.READ_ALL, api.metrics_page, returns=Raw, media_types=("text/plain",)),
    Route("GET", "/api/runs", Permission.READ, api.list_runs, returns=list[RunSummary]),
    Route("POST", "/api/runs", Permission.MANAGE, api.create_run, body=RunSpec, returns=Run),
    Route("GET", _RUN, Permission.READ, api.get_run, returns=Run),
    Route("DELETE", _RUN, Permission.DELETE, api.delete_run),
    Route("GET", _RUN + "/summary", Permission.READ, api.summarise_run, returns=RunSummary),
    Route("GET", _RUN + "/events", Permission.READ, api.follow_events, query=EventCursor, returns=EventLog, waits=True),
    Route("GET", _RUN + "/metrics", Permission.READ, api.list_metrics, query=Cursor, returns=Metrics),
    Route("POST", _RUN + "/metrics", Permission.MANAGE, api.record_metrics, body=tuple[Metric, ...], returns=Recorded),
    Route("POST", _RUN + "/credits", Permission.MANAGE, api.record_credits, body=StepCredits, returns=Recorded),
    Route("GET", _RUN + "/versions", Permission.READ, api.list_versions, returns=list[Version]),
    Route("POST", _RUN + "/versions", Permission.MANAGE, api.publish_version, body=Version, returns=Recorded),
    Route("GET", _RUN + "/call_times", Permission.READ, api.get_call_times, returns=CallTimes),
    Route("POST", _RUN + "/policies/{policy}/hold", Permission.MANAGE, api.hold_calls, returns=HoldReply),
    Route("POST", _RUN + "/groups", Permission.MANAGE, api.enqueue, body=GroupSpec, returns=Group),
    Route("GET", _GROUP, Permission.READ, api.get_group, returns=Group),
    Route("GET", _GROUP + "/episodes", Permission.READ_EPISODES, api.group_episodes, returns=list[Episode]),
    Route("POST", _GROUP + "/cancel", Permission.MANAGE, api.cancel_group, returns=CancelReply),
    Route(
        "POST",
        "/api/scorings",
        Permission.WORK,
        api.lease_scoring,
        body=ScoringRequest,
        returns=list[GroupScoring],
        waits=True,
    ),
    Route("POST", _GROUP + "/beat", Permission.WORK, api.heartbeat_scoring, body=ScoringHeartbeat, returns=Counted),
    Route("POST", _GROUP + "/scores", Permission.WORK, api.score_group, body=Scores, returns=Counted),
    Route(
        "GET", _RUN + "/rollouts", Permission.READ, api.list_rollouts, query=RolloutPage, returns=list[ListedRollout]
    ),
    Route("GET", _ROLLOUT, Permission.READ, api.get_rollout, returns=RolloutDetail),
    Route("GET", _ROLLOUT + "/credits", Permission.READ, api.rollout_credits, returns=list[StepCredits]),
    Route("POST", _ROLLOUT + "/cancel", Permission.MANAGE, api.cancel_rollout, returns=CancelReply),
    Route("GET", _ATTEMPT, Permission.READ_EPISODES, api.get_episode, returns=Episode),
    Route("POST", _ATTEMPT + "/calls", Permission.RECORD, api.record_calls, body=tuple[Call, ...], returns=Recorded),
    Route(
        "POST", _ATTEMPT + "/rewards", Permission.REWARD, api.record_rewards, body=tuple[Reward, ...], returns=Recorded
    ),
    Route("POST", _ATTEMPT + "/finish", Permission.WORK, api.finish, body=FinishRequest, returns=FinishReply),
    Route("POST", _ATTEMPT + "/timeout", Permission.WORK, api.time_out, body=TimeoutRequest, returns=TimeoutReply),
    Route("POST", "/api/lease", Permission.WORK, api.lease, body=LeaseRequest, returns=list[Lease], waits=True),
    Route("GET", "/api/workers", Permission.READ_ALL, api.list_workers, returns=list[Worker]),
    Route("POST", "/api/workers/{worker}/withdraw", Permission.WORK, api.withdraw),
    Route(
        "POST",
        "/api/workers/{worker}/beat",
        Permission.WORK,
        api.heartbeat,
        body=HeartbeatRequest,
        returns=HeartbeatReply,
    ),
    Route("POST", "/api/keys", Permission.CREATE_KEYS, api.create_key, body=KeySpec, returns=NewKey),
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
ROUTES += DASHBOARD_ROUTES
ROUTES.append(Route("GET", "/openapi.json", None, openapi_handler(ROUTES), returns=Raw))
