"""Handlers of the control API. Their routes are in routes.py, the permissions in keys.py."""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace
from sqlalchemy.exc import SQLAlchemyError

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
from leyden.records import Call, Group, Metric, Reward, RewardKind, Run, Span, StepCredits, Version, Worker
from leyden.server.control import otlp
from leyden.server.control.keys import AGENT_KINDS, Key, KeyKind, KeyRefused, check_attempt
from leyden.server.control.telemetry import CONTENT_TYPE
from leyden.server.http.errors import ApiError
from leyden.server.http.responses import Raw, Request
from leyden.server.service import ServerContext
from leyden.store.errors import Conflict, NotFound
from leyden.store.read import queries
from leyden.store.write.queue import ActiveLease, LeaseQuery

_ATTEMPT_KEY_TTL = 30 * 86_400.0  # an upper bound: the key is invalid once its attempt has ended
_SMALL_EXPORT = 4096
"""Bytes of spans that are read in the time that a thread would take to start on them."""

Plain = Request[None, None]


async def health(service: ServerContext, request: Plain) -> dict[str, str]:
    """Answer that the server is up."""
    return {"status": "ok"}


async def metrics_page(service: ServerContext, request: Plain) -> Raw:
    """Return the server's metrics for Prometheus."""
    with suppress(SQLAlchemyError):  # the other metrics are wanted most while the database is down
        service.telemetry.store_bytes.set(await asyncio.to_thread(service.store.database.size))
    return Raw(service.telemetry.render(), CONTENT_TYPE)


async def list_runs(service: ServerContext, request: Plain) -> list[RunSummary]:
    """List the runs that the key may read, oldest first."""
    only = request.key.run
    return await service.store.read(
        lambda connection: [
            queries.summarise_run(connection, id) for id in queries.list_run_ids(connection) if only in (None, id)
        ]
    )


async def create_run(service: ServerContext, request: Request[RunSpec, None]) -> Run:
    """Create a run; repeating the request changes nothing."""
    return await service.store.create_run(request.body)


async def get_run(service: ServerContext, request: Plain) -> Run:
    """Return a run with its configuration."""
    return await service.store.read(queries.get_run, request.path["run"])


async def summarise_run(service: ServerContext, request: Plain) -> RunSummary:
    """Count what a run holds."""
    return await service.store.read(queries.summarise_run, request.path["run"])


async def delete_run(service: ServerContext, request: Plain) -> None:
    """Delete a run and free its space."""
    await service.store.delete_run(request.path["run"])


async def enqueue(service: ServerContext, request: Request[GroupSpec, None]) -> Group:
    """Queue a group of rollouts; repeating the request changes nothing."""
    return await service.store.enqueue(request.path["run"], request.body)


async def get_group(service: ServerContext, request: Plain) -> Group:
    """Return a group."""
    return await service.store.read(queries.get_group, request.path["run"], request.path["group"])


async def group_episodes(service: ServerContext, request: Plain) -> list[Episode]:
    """Return the episode of the latest attempt of each rollout of a group."""
    return await service.store.read(queries.group_episodes, request.path["run"], request.path["group"])


async def cancel_group(service: ServerContext, request: Plain) -> CancelReply:
    """Cancel the unfinished rollouts of a group."""
    return CancelReply(await service.store.cancel_group(request.path["run"], request.path["group"]))


async def list_rollouts(service: ServerContext, request: Request[None, RolloutPage]) -> list[ListedRollout]:
    """List rollouts in the order in which they were queued."""
    query = request.query
    return await service.store.read(
        queries.list_rollouts, request.path["run"], after=query.after, limit=query.limit, state=query.state
    )


async def get_rollout(service: ServerContext, request: Plain) -> RolloutDetail:
    """Return a rollout with its task and attempts."""
    return await service.store.read(queries.get_rollout, request.path["run"], request.path["rollout"])


async def cancel_rollout(service: ServerContext, request: Plain) -> CancelReply:
    """Cancel a rollout."""
    return CancelReply(await service.store.cancel_rollout(request.path["run"], request.path["rollout"]))


async def get_episode(service: ServerContext, request: Plain) -> Episode:
    """Return the episode of an attempt."""
    return await service.store.read(queries.get_episode, request.path["run"], request.path["attempt"])


async def record_calls(service: ServerContext, request: Request[tuple[Call, ...], None]) -> Recorded:
    """Record model calls of an active attempt."""
    return Recorded(await service.store.record_calls(request.path["run"], request.path["attempt"], request.body))


async def record_rewards(service: ServerContext, request: Request[tuple[Reward, ...], None]) -> Recorded:
    """Record rewards of an active attempt; with an admin key also of an ended one, which rescores it."""
    run, attempt = request.path["run"], request.path["attempt"]
    rewards = request.body
    if request.key.kind in AGENT_KINDS:
        _check_agent_rewards(service.leases.get(attempt), rewards)
        rewards = tuple(replace(reward, source="agent") for reward in rewards)  # an agent cannot name another source
    rescoring = request.key.kind is KeyKind.ADMIN and service.leases.get(attempt) is None
    return Recorded(await service.store.record_rewards(run, attempt, rewards, rescoring=rescoring))


def _check_agent_rewards(lease: ActiveLease | None, rewards: Sequence[Reward]) -> None:
    """Raise `KeyRefused` for rewards that are not an agent's to give."""
    kinds = {reward.kind for reward in rewards}
    if RewardKind.AUTOMATIC in kinds:
        raise KeyRefused(403, "not_permitted", "automatic rewards are set by the trainer: send rewards of kind step")
    if RewardKind.FINAL in kinds and (lease is None or not lease.agent_final_rewards):
        message = "the reward function of this run sets the final reward: send rewards of kind step"
        raise KeyRefused(403, "not_permitted", message)


async def finish(service: ServerContext, request: Request[FinishRequest, None]) -> FinishReply:
    """End an attempt. A repeated or late report is logged and changes nothing."""
    run, attempt, report = request.path["run"], request.path["attempt"], request.body
    if service.gateway is not None:
        report = await service.gateway.end_attempt(run, attempt, report)
    finished = await service.store.finish(run, attempt, report)
    return replace(finished, queue_pressure=service.gateway.queue_pressure() if service.gateway else None)


async def time_out(service: ServerContext, request: Request[TimeoutRequest, None]) -> TimeoutReply:
    """Return the time that an attempt has left; if none, cut its calls in flight and refuse further ones."""
    lease, body = service.leases.get(request.path["attempt"]), request.body
    if lease is None or lease.run != request.path["run"]:
        raise NotFound(f"no active attempt {request.path['attempt']!r} in run {request.path['run']!r}")
    if service.gateway is None:
        return TimeoutReply(max(0.0, body.limit_s - body.ran_s))
    return TimeoutReply(await service.gateway.time_out(lease, body.ran_s, body.limit_s))


async def lease_scoring(service: ServerContext, request: Request[ScoringRequest, None]) -> list[GroupScoring]:
    """Lease a group for scoring; wait if there is none."""
    body = request.body
    scoring = await service.store.lease_scoring(body.worker, _allowed_run(request.key, body.run), body.wait)
    return [] if scoring is None else [scoring]


async def heartbeat_scoring(service: ServerContext, request: Request[ScoringHeartbeat, None]) -> Counted:
    """Renew the lease of a group scoring."""
    return await service.store.heartbeat_scoring(request.path["run"], request.path["group"], request.body.number)


async def score_group(service: ServerContext, request: Request[Scores, None]) -> Counted:
    """Record the scores of a group, which finishes it. A late report is logged and changes nothing."""
    return await service.store.score(request.path["run"], request.path["group"], request.body)


async def follow_events(service: ServerContext, request: Request[None, EventCursor]) -> EventLog:
    """Read a run's events after a cursor; wait if there are none."""
    return await service.store.events(request.path["run"], request.query)


async def record_credits(service: ServerContext, request: Request[StepCredits, None]) -> Recorded:
    """Record what a training step computed for calls; repeating it overwrites."""
    return Recorded(await service.store.record_credits(request.path["run"], request.body))


async def rollout_credits(service: ServerContext, request: Plain) -> list[StepCredits]:
    """Return value, advantage, weight and trained tokens of each call of a rollout, or why it was left out."""
    return await service.store.read(queries.rollout_credits, request.path["run"], request.path["rollout"])


async def record_metrics(service: ServerContext, request: Request[tuple[Metric, ...], None]) -> Recorded:
    """Record metrics of a run."""
    return Recorded(await service.store.record_metrics(request.path["run"], request.body))


async def list_metrics(service: ServerContext, request: Request[None, Cursor]) -> Metrics:
    """Read a run's metrics after a cursor."""
    after, limit = request.query.after, request.query.limit
    found = await service.store.read(queries.list_metrics, request.path["run"], after=after, limit=limit)
    return Metrics(tuple(metric for _, metric in found), found[-1][0] if found else after)


async def hold_calls(service: ServerContext, request: Plain) -> HoldReply:
    """Start no model call of a policy until its next version is published; return how many calls wait."""
    model = service.gateway.models.get(request.path["policy"]) if service.gateway is not None else None
    if model is None:
        return HoldReply(0)  # it is not served here: there is nothing to hold
    model.hold()
    return HoldReply(model.scheduler.waiting)


async def get_call_times(service: ServerContext, request: Plain) -> CallTimes:
    """Return how long the model calls of a run have taken in this server, and at what."""
    times = service.gateway.times.get(request.path["run"]) if service.gateway is not None else None
    return times or CallTimes()


async def publish_version(service: ServerContext, request: Request[Version, None]) -> Recorded:
    """Record that a version of a policy is served from now on; calls that were held for it resume."""
    version = request.body
    recorded = await service.store.publish_version(request.path["run"], version)
    if service.gateway is not None and (model := service.gateway.models.get(version.policy)) is not None:
        model.resume(version.number)
    return Recorded(recorded)


async def list_versions(service: ServerContext, request: Plain) -> list[Version]:
    """Return the newest version of each policy."""
    return await service.store.read(queries.latest_versions, request.path["run"])


async def list_workers(service: ServerContext, request: Plain) -> list[Worker]:
    """List the workers, most recently seen first."""
    return await service.store.read(queries.list_workers)


async def lease(service: ServerContext, request: Request[LeaseRequest, None]) -> list[Lease]:
    """Lease rollouts to a worker; wait if there are none."""
    body = request.body
    query = LeaseQuery(body.worker, body.count, _allowed_run(request.key, body.run), body.pool)
    leases = []
    for leased in await service.store.lease(query, body.wait):
        attempt = leased.attempt
        text, _ = service.keyring.create(
            KeyKind.ATTEMPT,
            _ATTEMPT_KEY_TTL,
            run=attempt.run,
            rollout=attempt.rollout,
            attempt=attempt.id,
            started=attempt.started,
        )
        traceparent = f"00-{attempt.trace_id}-{secrets.token_hex(8)}-01"
        about = (attempt, leased.task, leased.purpose, leased.lease_s)
        leases.append(Lease(*about, text, service.settings.url, traceparent, leased.alone))
    return leases


async def withdraw(service: ServerContext, request: Plain) -> None:
    """Answer a worker's waiting lease requests at once, because it takes no more work."""
    service.store.withdraw(request.path["worker"])


def _allowed_run(key: Key, requested: str | None) -> str | None:
    """Return the run to lease from (None: any): the requested one, if the key allows it."""
    if key.run is not None and requested not in (None, key.run):
        raise KeyRefused(403, "not_permitted", f"this key is for run {key.run}, not {requested}")
    return requested or key.run


async def heartbeat(service: ServerContext, request: Request[HeartbeatRequest, None]) -> HeartbeatReply:
    """Renew a worker's leases, and report which of its attempts to stop."""
    return await service.store.heartbeat(request.path["worker"], request.body.attempts, request.key.run)


async def create_key(service: ServerContext, request: Request[KeySpec, None]) -> NewKey:
    """Create a key with no wider scope and no later expiry than the key of the request."""
    spec, creator = request.body, request.key
    kind = KeyKind(spec.kind)
    if creator.kind is KeyKind.WORKER and kind is not KeyKind.POOL:
        raise KeyRefused(403, "not_permitted", "a worker's key creates keys of kind pool only")
    if creator.run is not None and spec.run not in (None, creator.run):
        raise KeyRefused(403, "not_permitted", f"this key is for run {creator.run}, not {spec.run}")
    if kind is KeyKind.ADMIN and spec.run is not None:
        raise ApiError(400, "invalid_request", "run: an admin key cannot be restricted to a run", "run")
    pool = secrets.token_hex(8) if kind is KeyKind.POOL else None
    ttl_s = min(spec.ttl_s, creator.expires - service.keyring.clock())
    text, key = service.keyring.create(kind, ttl_s, run=spec.run or creator.run, pool=pool)
    return NewKey(text, key.expires, pool)


async def export_traces(service: ServerContext, request: Request[Raw, None]) -> Raw:
    """Record spans over OTLP, each with its attempt.

    An attempt's key names the attempt; with other keys, the span's attribute `leyden.attempt` or its trace id does.
    Spans that belong to no active attempt of the key are rejected, counted and reported to the exporter.
    """
    content, content_type = request.body.content, request.body.content_type
    if len(content) <= _SMALL_EXPORT:
        spans = otlp.read_spans(content, content_type)
    else:
        spans = await service.offload.run(request.key.id, otlp.read_spans, content, content_type)
    found: dict[ActiveLease, list[Span]] = defaultdict(list)
    rejected = 0
    for span in spans:
        lease = _lease_of(service, request.key, span)
        if lease is None:
            rejected += 1
        else:
            found[lease].append(span)
    recorded = await asyncio.gather(
        *(service.store.record_spans(lease.run, lease.attempt, some) for lease, some in found.items()),
        return_exceptions=True,
    )
    for some, result in zip(found.values(), recorded, strict=True):
        if isinstance(result, Conflict | NotFound):  # the attempt ended before the spans were recorded
            rejected += len(some)
        elif isinstance(result, BaseException):
            raise result
    if rejected:
        service.telemetry.spans_rejected.inc(rejected)
    message = f"{rejected} of {len(spans)} spans belong to no active attempt of this key" if rejected else ""
    return Raw(otlp.response_body(rejected, message, content_type), content_type)


def _lease_of(service: ServerContext, key: Key, span: Span) -> ActiveLease | None:
    named = key.attempt or otlp.attempt_of(span)
    lease = service.leases.get(named) if named else service.leases.by_trace(span.trace_id)
    if lease is None or key.run not in (None, lease.run):
        return None
    try:
        check_attempt(key, service.leases, lease.attempt)
    except KeyRefused:
        return None
    return lease
