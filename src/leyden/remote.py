"""A Leyden server, from elsewhere: the control API as methods. Workers, trainers and the command line use this."""

from collections.abc import Sequence
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from leyden.episodes import Episode
from leyden.records import Call, EventKind, Group, Metric, Reward, Run, Version
from leyden.wire import (
    CancelReply,
    Counted,
    EventLog,
    FinishReply,
    FinishRequest,
    GroupScoring,
    GroupSpec,
    HeartbeatReply,
    HeartbeatRequest,
    KeySpec,
    Lease,
    LeaseRequest,
    ListedRollout,
    Metrics,
    NewKey,
    Recorded,
    RolloutDetail,
    RunSpec,
    RunSummary,
    Scores,
    ScoringHeartbeat,
    ScoringRequest,
)

T = TypeVar("T")

_JSON = "application/json"
_MSGPACK = "application/msgpack"
_LONGEST_WAIT_S = 330


class RemoteError(Exception):
    """The server refused; `status` and `reason` say how, the message says why."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class ServerUnreachable(ConnectionError):
    """The server gave no answer. The message names its URL, and says whether it was unreachable or too slow."""


class Remote:
    """A connection to a server, with a key. Use it as a context manager."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"accept": _MSGPACK, **({"authorization": f"Bearer {key}"} if key else {})}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=_LONGEST_WAIT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, method: str, path: str, returns: type[T], body: Any = None, **query: str | float | None) -> T:
        """Send one request and decode its answer."""
        data, content_type = _encode(body)
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers={"content-type": content_type},
                params={name: value for name, value in query.items() if value is not None},
            ) as reply:
                answer = await reply.read()
        except TimeoutError as error:
            raise ServerUnreachable(f"the server at {self.url} did not answer within {_LONGEST_WAIT_S} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"cannot reach the server at {self.url} ({error})") from error
        if reply.status >= 400:
            raise _error(reply.status, answer)
        try:
            if reply.content_type == _MSGPACK:
                return msgspec.msgpack.decode(answer, type=returns)
            return msgspec.json.decode(answer or b"null", type=returns)
        except msgspec.DecodeError as error:
            raise RemoteError(
                reply.status, "unknown", f"{self.url} does not answer like a Leyden server of this version: {error}"
            ) from error

    # Runs, as a trainer or a person sees them

    async def runs(self) -> list[RunSummary]:
        """Every run that the key may see."""
        return await self.ask("GET", "/api/runs", list[RunSummary])

    async def create_run(self, spec: RunSpec) -> Run:
        """Create a run, idempotently."""
        return await self.ask("POST", "/api/runs", Run, spec)

    async def run(self, run: str) -> Run:
        """A run with its configuration."""
        return await self.ask("GET", f"/api/runs/{run}", Run)

    async def summary(self, run: str) -> RunSummary:
        """A run in numbers."""
        return await self.ask("GET", f"/api/runs/{run}/summary", RunSummary)

    async def delete_run(self, run: str) -> None:
        """Delete a run and free its space."""
        await self.ask("DELETE", f"/api/runs/{run}", type(None))

    async def events(self, run: str, after: int = 0, wait: float = 0.0, kind: EventKind | None = None) -> EventLog:
        """A run's log after a cursor."""
        return await self.ask("GET", f"/api/runs/{run}/events", EventLog, after=after, wait=wait, kind=kind)

    async def metrics(self, run: str, after: int = 0) -> Metrics:
        """A run's numbers after a cursor."""
        return await self.ask("GET", f"/api/runs/{run}/metrics", Metrics, after=after)

    async def record_metrics(self, run: str, metrics: Sequence[Metric]) -> Recorded:
        """Record numbers of a run."""
        return await self.ask("POST", f"/api/runs/{run}/metrics", Recorded, metrics)

    async def publish_version(self, run: str, version: Version) -> Recorded:
        """Record that a version is being served."""
        return await self.ask("POST", f"/api/runs/{run}/versions", Recorded, version)

    # Groups and rollouts

    async def enqueue(self, run: str, spec: GroupSpec) -> Group:
        """Queue a group of rollouts, idempotently."""
        return await self.ask("POST", f"/api/runs/{run}/groups", Group, spec)

    async def group_episodes(self, run: str, group: str) -> list[Episode]:
        """What the latest attempt of each rollout of a group left behind."""
        return await self.ask("GET", f"/api/runs/{run}/groups/{group}/episodes", list[Episode])

    async def cancel_group(self, run: str, group: str) -> CancelReply:
        """Cancel what is unfinished of a group."""
        return await self.ask("POST", f"/api/runs/{run}/groups/{group}/cancel", CancelReply)

    async def rollouts(self, run: str, after: str = "", limit: int = 100) -> list[ListedRollout]:
        """Rollouts in the order in which they were queued."""
        return await self.ask("GET", f"/api/runs/{run}/rollouts", list[ListedRollout], after=after, limit=limit)

    async def rollout(self, run: str, rollout: str) -> RolloutDetail:
        """A rollout with its task and attempts."""
        return await self.ask("GET", f"/api/runs/{run}/rollouts/{rollout}", RolloutDetail)

    async def cancel_rollout(self, run: str, rollout: str) -> CancelReply:
        """Cancel a rollout."""
        return await self.ask("POST", f"/api/runs/{run}/rollouts/{rollout}/cancel", CancelReply)

    async def episode(self, run: str, attempt: str) -> Episode:
        """All that an attempt left behind."""
        return await self.ask("GET", f"/api/runs/{run}/attempts/{attempt}", Episode)

    # Work, as a worker does it

    async def lease(self, request: LeaseRequest) -> list[Lease]:
        """Lease rollouts, waiting for some."""
        return await self.ask("POST", "/api/lease", list[Lease], request)

    async def withdraw(self, worker: str) -> None:
        """Have what a worker has asked for answered at once: it will take no more."""
        await self.ask("POST", f"/api/workers/{worker}/withdraw", type(None))

    async def beat(self, worker: str, attempts: Sequence[str]) -> HeartbeatReply:
        """Keep attempts alive."""
        return await self.ask("POST", f"/api/workers/{worker}/beat", HeartbeatReply, HeartbeatRequest(tuple(attempts)))

    async def record_calls(self, run: str, attempt: str, calls: Sequence[Call]) -> Recorded:
        """Record model calls."""
        return await self.ask("POST", f"/api/runs/{run}/attempts/{attempt}/calls", Recorded, calls)

    async def record_rewards(self, run: str, attempt: str, rewards: Sequence[Reward]) -> Recorded:
        """Record rewards."""
        return await self.ask("POST", f"/api/runs/{run}/attempts/{attempt}/rewards", Recorded, rewards)

    async def finish(self, run: str, attempt: str, report: FinishRequest) -> FinishReply:
        """End an attempt."""
        return await self.ask("POST", f"/api/runs/{run}/attempts/{attempt}/finish", FinishReply, report)

    async def lease_scoring(self, request: ScoringRequest) -> list[GroupScoring]:
        """Lease a group to score, waiting for one."""
        return await self.ask("POST", "/api/scorings", list[GroupScoring], request)

    async def beat_scoring(self, run: str, group: str, number: int) -> Counted:
        """Keep the lease of a scoring alive."""
        return await self.ask("POST", f"/api/runs/{run}/groups/{group}/beat", Counted, ScoringHeartbeat(number))

    async def score(self, run: str, group: str, scores: Scores) -> Counted:
        """Give the scores of a group."""
        return await self.ask("POST", f"/api/runs/{run}/groups/{group}/scores", Counted, scores)

    async def make_key(self, spec: KeySpec) -> NewKey:
        """Make a key."""
        return await self.ask("POST", "/api/keys", NewKey, spec)


def _encode(body: Any) -> tuple[bytes | None, str]:
    if body is None:
        return None, _JSON
    try:
        return msgspec.msgpack.encode(body), _MSGPACK
    except OverflowError:  # an integer of more than 64 bits
        return msgspec.json.encode(body), _JSON


def _error(status: int, data: bytes) -> RemoteError:
    try:
        error = msgspec.json.decode(data)["error"]
        return RemoteError(status, error["type"], error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return RemoteError(status, "unknown", data[:200].decode(errors="replace"))
