"""Handlers of the control API that do more than one operation of the store. Their routes are in routes.py."""

# ruff: noqa: D103  (the endpoint of a handler says what it does: api/endpoints.py)

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from msgspec.structs import replace
from sqlalchemy.exc import SQLAlchemyError

from leyden.api.wire import (
    RUN_ENDED,
    CallTimes,
    Cursor,
    Existence,
    FinishReply,
    FinishRequest,
    GroupScoring,
    HeartbeatReply,
    HeartbeatRequest,
    HoldReply,
    KeySpec,
    Lease,
    LeaseRequest,
    Metrics,
    NewKey,
    Recorded,
    RunSummary,
    ScoringRequest,
    TimeoutReply,
    TimeoutRequest,
)
from leyden.records import Attempt, Reward, RewardKind, RunSettings, Span, Version
from leyden.server.control import otlp
from leyden.server.control.keys import AGENT_KINDS, Key, KeyKind, KeyRefused, check_attempt
from leyden.server.control.telemetry import CONTENT_TYPE
from leyden.server.http.errors import ApiError
from leyden.server.http.responses import Raw, Request
from leyden.server.service import ServerContext
from leyden.store.errors import Conflict, NotFound
from leyden.store.read import queries

_ATTEMPT_KEY_TTL = 30 * 86_400.0  # an upper bound: the key is invalid once its attempt has ended
_SMALL_EXPORT = 4096
"""Bytes of spans that are read in the time that a thread would take to start on them."""

Plain = Request[None, None]


async def health(service: ServerContext, key: Key) -> dict[str, str]:
    return {"status": "ok"}


async def metrics_page(service: ServerContext, request: Plain) -> Raw:
    """Return the server's metrics for Prometheus."""
    with suppress(SQLAlchemyError):  # the other metrics are wanted most while the database is down
        service.telemetry.store_bytes.set(await asyncio.to_thread(service.store.database.size))
    return Raw(service.telemetry.render(), CONTENT_TYPE)


async def list_runs(service: ServerContext, key: Key) -> list[RunSummary]:
    return await service.store.read(
        lambda connection: [
            queries.summarise_run(connection, id) for id in queries.list_run_ids(connection) if key.run in (None, id)
        ]
    )


async def run_exists(service: ServerContext, key: Key, run: str) -> Existence:
    return Existence(bool(await service.store.read(queries.list_run_ids, run)))


async def record_rewards(service: ServerContext, key: Key, run: str, attempt: str, new: Sequence[Reward]) -> Recorded:
    if key.kind in AGENT_KINDS:
        _check_agent_rewards((await service.store.read(queries.get_run, run)).settings, new)
        new = [replace(reward, source="agent") for reward in new]  # an agent cannot name another source
    rescoring = key.kind is KeyKind.ADMIN and service.leases.get(attempt) is None
    return Recorded(await service.store.record_rewards(run, attempt, new, rescoring=rescoring))


def _check_agent_rewards(settings: RunSettings, rewards: Sequence[Reward]) -> None:
    """Raise `KeyRefused` for rewards that are not an agent's to give."""
    if not settings.agent_rewards:
        message = "this run accepts no rewards from agents: set agent_rewards, or return the reward from the agent"
        raise KeyRefused(message)
    kinds = {reward.kind for reward in rewards}
    if RewardKind.AUTOMATIC in kinds:
        raise KeyRefused("automatic rewards are set by the trainer: send rewards of kind step")
    if RewardKind.FINAL in kinds and settings.reward_function:
        raise KeyRefused("the reward function of this run sets the final reward: send rewards of kind step")


async def finish(service: ServerContext, key: Key, run: str, attempt: str, report: FinishRequest) -> FinishReply:
    if service.gateway is not None:
        report = await service.gateway.end_attempt(run, attempt, report)
    finished = await service.store.finish(run, attempt, report)
    return replace(finished, queue_pressure=service.gateway.queue_pressure() if service.gateway else None)


async def time_out(service: ServerContext, key: Key, run: str, attempt: str, report: TimeoutRequest) -> TimeoutReply:
    active = service.leases.get(attempt)
    if active is None or active.run != run:
        raise NotFound(f"no active attempt {attempt!r} in run {run!r}")
    if service.gateway is None:
        return TimeoutReply(max(0.0, report.limit_s - report.ran_s))
    return TimeoutReply(await service.gateway.time_out(active, report.ran_s, report.limit_s))


async def lease_scoring(service: ServerContext, key: Key, request: ScoringRequest) -> list[GroupScoring]:
    scoring = await service.store.lease_scoring(request.worker, _allowed_run(key, request.run), request.wait)
    return [] if scoring is None else [scoring]


async def list_metrics(service: ServerContext, key: Key, run: str, cursor: Cursor) -> Metrics:
    found = await service.store.read(queries.list_metrics, run, after=cursor.after, limit=cursor.limit)
    return Metrics(tuple(metric for _, metric in found), found[-1][0] if found else cursor.after)


async def hold_calls(service: ServerContext, key: Key, run: str, policy: str) -> HoldReply:
    model = service.gateway.models.get(policy) if service.gateway is not None else None
    if model is None:
        return HoldReply(0)  # it is not served here: there is nothing to hold
    model.hold()
    return HoldReply(model.scheduler.waiting)


async def get_call_times(service: ServerContext, key: Key, run: str) -> CallTimes:
    times = service.gateway.times.get(run) if service.gateway is not None else None
    return times or CallTimes()


async def publish_version(service: ServerContext, key: Key, run: str, version: Version) -> Recorded:
    recorded = await service.store.publish_version(run, version)
    if service.gateway is not None and (model := service.gateway.models.get(version.policy)) is not None:
        model.resume(version.number)
    return Recorded(recorded)


async def end_run(service: ServerContext, key: Key, run: str) -> None:
    service.ended_runs.add(run)
    service.store.withdraw(run=run)


async def lease(service: ServerContext, key: Key, request: LeaseRequest) -> list[Lease]:
    request = replace(request, run=_allowed_run(key, request.run))
    if request.use is not None:
        service.note_use(request.worker, request.use)
    leases: list[Lease] = []
    found = [] if request.run in service.ended_runs else await service.store.lease(request)
    if not found and request.run in service.ended_runs:
        raise ApiError(410, RUN_ENDED, f"run {request.run} is done")
    for leased in found:
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
        leases.append(replace(leased, key=text, url=service.url, traceparent=traceparent))
    return leases


async def withdraw(service: ServerContext, key: Key, worker: str) -> None:
    service.store.withdraw(worker=worker)


def _allowed_run(key: Key, requested: str | None) -> str | None:
    """Return the run to lease from (None: any): the requested one, if the key allows it."""
    if requested is not None:
        key.check_run(requested)
    return requested or key.run


async def heartbeat(service: ServerContext, key: Key, worker: str, running: HeartbeatRequest) -> HeartbeatReply:
    return await service.store.heartbeat(worker, running.attempts, key.run)


async def create_key(service: ServerContext, creator: Key, spec: KeySpec) -> NewKey:
    kind = KeyKind(spec.kind)
    if creator.kind is KeyKind.WORKER and kind is not KeyKind.POOL:
        raise KeyRefused("a worker's key creates keys of kind pool only")
    if spec.run is not None:
        creator.check_run(spec.run)
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
    found: dict[tuple[str, str], list[Span]] = defaultdict(list)
    rejected = 0
    for span in spans:
        attempt = _attempt_of(service, request.key, span)
        if attempt is None:
            rejected += 1
        else:
            found[attempt.run, attempt.id].append(span)
    recorded = await asyncio.gather(
        *(service.store.record_spans(run, attempt, some) for (run, attempt), some in found.items()),
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


def _attempt_of(service: ServerContext, key: Key, span: Span) -> Attempt | None:
    named = key.attempt or otlp.attempt_of(span)
    attempt = service.leases.get(named) if named else service.leases.by_trace(span.trace_id)
    if attempt is None or key.run not in (None, attempt.run):
        return None
    try:
        check_attempt(key, service.leases, attempt.id)
    except KeyRefused:
        return None
    return attempt
