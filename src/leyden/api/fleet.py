"""What workers, engines and the queue do at this moment, of one server or of several stores together."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from leyden.process.usage import ResourceUse

MAX_LEASES = 200
"""Active attempts that a `Fleet` lists."""


class LeaseView(Struct, frozen=True):
    """An active attempt."""

    run: str
    rollout: str
    attempt: str
    worker: str
    started: float
    purpose: str


class WorkerView(Struct, frozen=True):
    """A worker: what it runs, and how its attempts of the last minutes ended."""

    id: str
    seen: float
    leases: int
    oldest: float | None
    """When the oldest of its active attempts started."""
    ended: dict[str, int]
    """Attempts that ended in the last ten minutes, by ending."""
    use: ResourceUse | None = None


class EngineView(Struct, frozen=True):
    """What serves a policy, and what it did in the last minute."""

    policy: str
    location: str
    """Where it runs: `embedded`, or the URL of vLLM or of an upstream."""
    version: int | None
    slots: int | None
    """Calls that it computes concurrently; None if it has no such limit."""
    running: int
    waiting: int
    held: bool
    calls: int
    """Calls that ended in the last minute."""
    failed: int
    """Those among them that failed."""
    tokens: int
    """Tokens sampled in the last minute; an upstream does not tell."""
    run: str = ""
    """The run in whose folder its server is; empty for this server's."""
    replicas: tuple[int | None, ...] = ()
    """The calls that run at each of several replicas; None at one that does not answer."""


class EngineReport(Struct, frozen=True):
    """The engines of a server, as it writes them into its home folder for other processes."""

    at: float
    engines: tuple[EngineView, ...]
    refused: dict[str, int]
    """Requests that the server refused since it started, by reason."""
    workers: dict[str, ResourceUse] = {}
    """What each worker and its agents use."""


class Fleet(Struct, frozen=True):
    """Workers, engines and the queue of a server."""

    now: float
    workers: tuple[WorkerView, ...]
    leases: tuple[LeaseView, ...]
    """The oldest ones, at most `MAX_LEASES`."""
    queued: int
    delayed: int
    """Queued rollouts that wait for their retry."""
    running: int
    ended: int
    """Attempts that ended in the last ten minutes."""
    tokens: int
    """Tokens sampled by attempts that ended in the last ten minutes."""
    engines: tuple[EngineView, ...] = ()
    refused: dict[str, int] = {}
    """Requests that the server refused since it started, by reason."""

    def present_workers(self) -> list[WorkerView]:
        """Return the workers that were seen in the last two minutes."""
        return [worker for worker in self.workers if worker.seen > self.now - 120]

    def has_worker(self) -> bool:
        """Whether a worker is present: a store without one is of a run that has ended."""
        return bool(self.present_workers())


def join_fleets(first: Fleet, others: Sequence[Fleet]) -> Fleet:
    """Add the workers, attempts and queues of other stores to those of one."""
    every = (first, *others)
    return Fleet(
        now=first.now,
        workers=tuple(worker for fleet in every for worker in fleet.workers),
        leases=tuple(
            sorted((lease for fleet in every for lease in fleet.leases), key=lambda one: one.started)[:MAX_LEASES]
        ),
        engines=tuple(engine for fleet in every for engine in fleet.engines),
        queued=sum(fleet.queued for fleet in every),
        delayed=sum(fleet.delayed for fleet in every),
        running=sum(fleet.running for fleet in every),
        ended=sum(fleet.ended for fleet in every),
        tokens=sum(fleet.tokens for fleet in every),
        refused=dict(sum((Counter(fleet.refused) for fleet in every), Counter[str]())),
    )


def add_engines(fleet: Fleet, reports: Sequence[EngineReport]) -> Fleet:
    """Add engines, refused requests and what workers use, as servers report them."""
    refused = sum((Counter(report.refused) for report in reports), Counter(fleet.refused))
    engines = (*fleet.engines, *(engine for report in reports for engine in report.engines))
    use = {worker: used for report in reports for worker, used in report.workers.items()}
    workers = tuple(replace(worker, use=use.get(worker.id)) for worker in fleet.workers)
    return replace(fleet, engines=engines, refused=dict(refused), workers=workers)
