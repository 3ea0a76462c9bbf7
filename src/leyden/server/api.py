"""The control API: what each route does. Who may call which is said elsewhere (routes.py, keys.py)."""

import asyncio
import secrets
from collections import defaultdict

from msgspec.structs import replace

from leyden.episodes import Episode
from leyden.records import Call, Group, Metric, Reward, Run, Span, Version, Worker
from leyden.server import otlp
from leyden.server.errors import ApiError
from leyden.server.http import Raw, Request
from leyden.server.keys import AGENTS, Key, KeyKind, KeyRefused, speak_for
from leyden.server.service import ServerContext
from leyden.server.telemetry import CONTENT_TYPE
from leyden.store import queries
from leyden.store.errors import Conflict, NotFound
from leyden.store.queue import ActiveLease, LeaseQuery
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

_ATTEMPT_KEY_TTL = 30 * 86_400.0  # an upper bound: the key dies with its attempt

Plain = Request[None, None]


async def health(service: ServerContext, request: Plain) -> dict[str, str]:
    """Say that the server is there."""
    return {"status": "ok"}


async def metrics_page(service: ServerContext, request: Plain) -> Raw:
    """Give the server's numbers to Prometheus."""
    return Raw(service.telemetry.page(), CONTENT_TYPE)


async def list_runs(service: ServerContext, request: Plain) -> list[RunSummary]:
    """List the runs that the key may see, oldest first."""
    only = request.key.run
    return await service.store.read(
        lambda look: [queries.summary(look, id) for id in queries.run_ids(look) if only in (None, id)]
    )


async def create_run(service: ServerContext, request: Request[RunSpec, None]) -> Run:
    """Create a run; the same again changes nothing."""
    return await service.store.create_run(request.body)


async def get_run(service: ServerContext, request: Plain) -> Run:
    """Show a run with its configuration."""
    return await service.store.read(queries.run, request.path["run"])


async def summarise_run(service: ServerContext, request: Plain) -> RunSummary:
    """Show what a run holds, in numbers."""
    return await service.store.read(queries.summary, request.path["run"])


async def delete_run(service: ServerContext, request: Plain) -> None:
    """Delete a run and free its space."""
    await service.store.delete_run(request.path["run"])


async def enqueue(service: ServerContext, request: Request[GroupSpec, None]) -> Group:
    """Queue a group of rollouts; the same again changes nothing."""
    return await service.store.enqueue(request.path["run"], request.body)


async def get_group(service: ServerContext, request: Plain) -> Group:
    """Show a group."""
    return await service.store.read(queries.group, request.path["run"], request.path["group"])


async def group_episodes(service: ServerContext, request: Plain) -> list[Episode]:
    """Show what the latest attempt of each rollout of a group left behind."""
    return await service.store.read(queries.group_episodes, request.path["run"], request.path["group"])


async def cancel_group(service: ServerContext, request: Plain) -> CancelReply:
    """Cancel what is unfinished of a group."""
    return CancelReply(await service.store.cancel_group(request.path["run"], request.path["group"]))


async def list_rollouts(service: ServerContext, request: Request[None, RolloutPage]) -> list[ListedRollout]:
    """List rollouts in the order in which they were queued."""
    query = request.query
    return await service.store.read(
        queries.rollout_list, request.path["run"], after=query.after, limit=query.limit, state=query.state
    )


async def get_rollout(service: ServerContext, request: Plain) -> RolloutDetail:
    """Show a rollout with its task and attempts."""
    return await service.store.read(queries.rollout_detail, request.path["run"], request.path["rollout"])


async def cancel_rollout(service: ServerContext, request: Plain) -> CancelReply:
    """Cancel a rollout."""
    return CancelReply(await service.store.cancel_rollout(request.path["run"], request.path["rollout"]))


async def get_episode(service: ServerContext, request: Plain) -> Episode:
    """Show all that an attempt left behind."""
    return await service.store.read(queries.episode, request.path["run"], request.path["attempt"])


async def record_calls(service: ServerContext, request: Request[tuple[Call, ...], None]) -> Recorded:
    """Record model calls of a live attempt."""
    return Recorded(await service.store.record_calls(request.path["run"], request.path["attempt"], request.body))


async def record_rewards(service: ServerContext, request: Request[tuple[Reward, ...], None]) -> Recorded:
    """Record rewards of a live attempt; with an admin key also of one that has ended, which rescores it."""
    run, attempt = request.path["run"], request.path["attempt"]
    rewards = request.body
    if request.key.kind in AGENTS:
        rewards = tuple(replace(reward, source="agent") for reward in rewards)  # it cannot pose as a grader
    rescoring = request.key.kind is KeyKind.ADMIN and service.leases.find(attempt) is None
    return Recorded(await service.store.record_rewards(run, attempt, rewards, rescoring=rescoring))


async def finish(service: ServerContext, request: Request[FinishRequest, None]) -> FinishReply:
    """End an attempt. A repeated or late report is recorded and changes nothing."""
    finished = await service.store.finish(request.path["run"], request.path["attempt"], request.body)
    return replace(finished, crowding=service.gateway.queue_pressure() if service.gateway else None)


async def lease_scoring(service: ServerContext, request: Request[ScoringRequest, None]) -> list[GroupScoring]:
    """Lease a group to score together; wait where there is none."""
    asked = request.body
    scoring = await service.store.lease_scoring(asked.worker, _run_asked_for(request.key, asked.run), asked.wait)
    return [] if scoring is None else [scoring]


async def beat_scoring(service: ServerContext, request: Request[ScoringHeartbeat, None]) -> Counted:
    """Keep the lease of a scoring alive."""
    return await service.store.beat_scoring(request.path["run"], request.path["group"], request.body.number)


async def score_group(service: ServerContext, request: Request[Scores, None]) -> Counted:
    """Take the scores of a group, which finishes it. A late report is recorded and changes nothing."""
    return await service.store.score(request.path["run"], request.path["group"], request.body)


async def follow_events(service: ServerContext, request: Request[None, EventCursor]) -> EventLog:
    """Read a run's log after a cursor; wait where there is nothing new."""
    return await service.store.events(request.path["run"], request.query)


async def record_metrics(service: ServerContext, request: Request[tuple[Metric, ...], None]) -> Recorded:
    """Record numbers of a run."""
    return Recorded(await service.store.record_metrics(request.path["run"], request.body))


async def list_metrics(service: ServerContext, request: Request[None, Cursor]) -> Metrics:
    """Read a run's numbers after a cursor."""
    after, limit = request.query.after, request.query.limit
    found = await service.store.read(queries.metric_list, request.path["run"], after=after, limit=limit)
    return Metrics(tuple(metric for _, metric in found), found[-1][0] if found else after)


async def hold_calls(service: ServerContext, request: Plain) -> HoldReply:
    """Start no model call of a policy until its next version is published; how many calls wait already."""
    served = service.gateway.models.get(request.path["policy"]) if service.gateway is not None else None
    if served is None:
        return HoldReply(0)  # it is not served here: there is nothing to hold
    served.hold()
    return HoldReply(served.scheduler.waiting)


async def publish_version(service: ServerContext, request: Request[Version, None]) -> Recorded:
    """Record that a version of a policy is being served from now on; calls that were held for it go on."""
    version = request.body
    recorded = await service.store.publish_version(request.path["run"], version)
    if service.gateway is not None and (served := service.gateway.models.get(version.policy)) is not None:
        served.resume(version.number)
    return Recorded(recorded)


async def list_versions(service: ServerContext, request: Plain) -> list[Version]:
    """Show the newest version of each policy."""
    return await service.store.read(queries.latest_versions, request.path["run"])


async def list_workers(service: ServerContext, request: Plain) -> list[Worker]:
    """List the workers, the latest heard of first."""
    return await service.store.read(queries.worker_list)


async def lease(service: ServerContext, request: Request[LeaseRequest, None]) -> list[Lease]:
    """Lease rollouts to a worker; wait where there are none."""
    asked = request.body
    want = LeaseQuery(asked.worker, asked.count, _run_asked_for(request.key, asked.run), asked.pool)
    leases = []
    for grant in await service.store.lease(want, asked.wait):
        attempt = grant.attempt
        text, _ = service.keyring.make(
            KeyKind.ATTEMPT,
            _ATTEMPT_KEY_TTL,
            run=attempt.run,
            rollout=attempt.rollout,
            attempt=attempt.id,
            started=attempt.started,
        )
        traceparent = f"00-{attempt.trace_id}-{secrets.token_hex(8)}-01"
        about = (attempt, grant.task, grant.purpose, grant.lease_s)
        leases.append(Lease(*about, text, service.settings.url, traceparent, grant.alone))
    return leases


async def withdraw(service: ServerContext, request: Plain) -> None:
    """Have a worker's waiting requests for work answered at once: it will take no more."""
    service.store.withdraw(request.path["worker"])


def _run_asked_for(key: Key, asked: str | None) -> str | None:
    """The run to work for, None for any: what was asked for, within what the key is for."""
    if key.run is not None and asked not in (None, key.run):
        raise KeyRefused(403, "not_permitted", f"this key is for run {key.run}, not {asked}")
    return asked or key.run


async def beat(service: ServerContext, request: Request[HeartbeatRequest, None]) -> HeartbeatReply:
    """Keep a worker's attempts alive, and learn which of them to stop."""
    return await service.store.beat(request.path["worker"], request.body.attempts, request.key.run)


async def make_key(service: ServerContext, request: Request[KeySpec, None]) -> NewKey:
    """Make a key that is neither wider nor longer-lived than the key that asks for it."""
    spec, maker = request.body, request.key
    kind = KeyKind(spec.kind)
    if maker.kind is KeyKind.WORKER and kind is not KeyKind.POOL:
        raise KeyRefused(403, "not_permitted", "a worker's key makes keys of kind pool only")
    if maker.run is not None and spec.run not in (None, maker.run):
        raise KeyRefused(403, "not_permitted", f"this key is for run {maker.run}, not {spec.run}")
    if kind is KeyKind.ADMIN and spec.run is not None:
        raise ApiError(400, "invalid_request", "run: an admin key is not confined to a run", "run")
    pool = secrets.token_hex(8) if kind is KeyKind.POOL else None
    ttl_s = min(spec.ttl_s, maker.expires - service.keyring.clock())
    text, key = service.keyring.make(kind, ttl_s, run=spec.run or maker.run, pool=pool)
    return NewKey(text, key.expires, pool)


async def export_traces(service: ServerContext, request: Request[Raw, None]) -> Raw:
    """Take spans over OTLP and store each against its attempt.

    An attempt's own key says which; a key that speaks for many has it in the span (an attribute `leyden.attempt`), or
    in the trace id. Spans of no live attempt are rejected, counted, and reported to the exporter.
    """
    spans = otlp.read_spans(request.body.content, request.body.content_type)
    found: dict[ActiveLease, list[Span]] = defaultdict(list)
    rejected = 0
    for span in spans:
        live = _attempt_of(service, request.key, span)
        if live is None:
            rejected += 1
        else:
            found[live].append(span)
    recorded = await asyncio.gather(
        *(service.store.record_spans(live.run, live.attempt, some) for live, some in found.items()),
        return_exceptions=True,
    )
    for some, result in zip(found.values(), recorded, strict=True):
        if isinstance(result, Conflict | NotFound):  # the attempt ended while the spans were on their way
            rejected += len(some)
        elif isinstance(result, BaseException):
            raise result
    if rejected:
        service.telemetry.spans_rejected.inc(rejected)
    why = f"{rejected} of {len(spans)} spans belong to no live attempt of this key" if rejected else ""
    return Raw(otlp.reply(rejected, why, request.body.content_type), request.body.content_type)


def _attempt_of(service: ServerContext, key: Key, span: Span) -> ActiveLease | None:
    named = key.attempt or otlp.attempt_of(span)
    live = service.leases.find(named) if named else service.leases.traced(span.trace_id)
    if live is None or key.run not in (None, live.run):
        return None
    try:
        speak_for(key, service.leases, live.attempt)
    except KeyRefused:
        return None
    return live
