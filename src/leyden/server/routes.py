"""The table of routes. Everything beneath a run has the run in its path, which is what a key is held against."""

from leyden.episodes import Episode
from leyden.records import Call, Group, Metric, Reward, Run, Version, Worker
from leyden.server import api
from leyden.server.gateway.routes import GATEWAY_ROUTES
from leyden.server.http import Raw, Route
from leyden.server.keys import Act
from leyden.server.openapi import describe
from leyden.wire import (
    Beat,
    BeatReply,
    CancelReply,
    Counted,
    Cursor,
    EventCursor,
    Finish,
    Finished,
    GroupSpec,
    KeySpec,
    Lease,
    LeaseRequest,
    ListedRollout,
    Log,
    Metrics,
    NewKey,
    Recorded,
    RolloutDetail,
    RolloutWindow,
    RunSpec,
    RunSummary,
    Scores,
    Scoring,
    ScoringBeat,
    ScoringRequest,
)

_RUN = "/api/runs/{run}"
_GROUP = _RUN + "/groups/{group}"
_ROLLOUT = _RUN + "/rollouts/{rollout}"
_ATTEMPT = _RUN + "/attempts/{attempt}"

ROUTES: list[Route] = [
    Route("GET", "/healthz", None, api.health, returns=dict[str, str]),
    Route("GET", "/metrics", Act.OVERSEE, api.metrics_page, returns=Raw),
    Route("GET", "/api/runs", Act.SEE, api.list_runs, returns=list[RunSummary]),
    Route("POST", "/api/runs", Act.STEER, api.create_run, body=RunSpec, returns=Run),
    Route("GET", _RUN, Act.SEE, api.get_run, returns=Run),
    Route("DELETE", _RUN, Act.DELETE, api.delete_run),
    Route("GET", _RUN + "/summary", Act.SEE, api.summarise_run, returns=RunSummary),
    Route("GET", _RUN + "/events", Act.SEE, api.follow_events, query=EventCursor, returns=Log, waits=True),
    Route("GET", _RUN + "/metrics", Act.SEE, api.list_metrics, query=Cursor, returns=Metrics),
    Route("POST", _RUN + "/metrics", Act.STEER, api.record_metrics, body=tuple[Metric, ...], returns=Recorded),
    Route("GET", _RUN + "/versions", Act.SEE, api.list_versions, returns=list[Version]),
    Route("POST", _RUN + "/versions", Act.STEER, api.publish_version, body=Version, returns=Recorded),
    Route("POST", _RUN + "/groups", Act.STEER, api.enqueue, body=GroupSpec, returns=Group),
    Route("GET", _GROUP, Act.SEE, api.get_group, returns=Group),
    Route("GET", _GROUP + "/episodes", Act.REVIEW, api.group_episodes, returns=list[Episode]),
    Route("POST", _GROUP + "/cancel", Act.STEER, api.cancel_group, returns=CancelReply),
    Route("POST", "/api/scorings", Act.WORK, api.lease_scoring, body=ScoringRequest, returns=list[Scoring], waits=True),
    Route("POST", _GROUP + "/beat", Act.WORK, api.beat_scoring, body=ScoringBeat, returns=Counted),
    Route("POST", _GROUP + "/scores", Act.WORK, api.score_group, body=Scores, returns=Counted),
    Route("GET", _RUN + "/rollouts", Act.SEE, api.list_rollouts, query=RolloutWindow, returns=list[ListedRollout]),
    Route("GET", _ROLLOUT, Act.SEE, api.get_rollout, returns=RolloutDetail),
    Route("POST", _ROLLOUT + "/cancel", Act.STEER, api.cancel_rollout, returns=CancelReply),
    Route("GET", _ATTEMPT, Act.REVIEW, api.get_episode, returns=Episode),
    Route("POST", _ATTEMPT + "/calls", Act.RECORD, api.record_calls, body=tuple[Call, ...], returns=Recorded),
    Route("POST", _ATTEMPT + "/rewards", Act.REWARD, api.record_rewards, body=tuple[Reward, ...], returns=Recorded),
    Route("POST", _ATTEMPT + "/finish", Act.WORK, api.finish, body=Finish, returns=Finished),
    Route("POST", "/api/lease", Act.WORK, api.lease, body=LeaseRequest, returns=list[Lease], waits=True),
    Route("GET", "/api/workers", Act.OVERSEE, api.list_workers, returns=list[Worker]),
    Route("POST", "/api/workers/{worker}/withdraw", Act.WORK, api.withdraw),
    Route("POST", "/api/workers/{worker}/beat", Act.WORK, api.beat, body=Beat, returns=BeatReply),
    Route("POST", "/api/keys", Act.MINT, api.make_key, body=KeySpec, returns=NewKey),
    Route("POST", "/v1/traces", Act.TRACE, api.export_traces, body=Raw, returns=Raw),
]
ROUTES += GATEWAY_ROUTES
ROUTES.append(Route("GET", "/openapi.json", None, describe(ROUTES), returns=Raw))
