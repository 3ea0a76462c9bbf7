"""HTTP client of the control API. Workers, the trainer and the command line use it.

A request fails in one of three ways: the server refuses it (`RemoteError`), the server cannot be reached
(`ServerUnreachable`), or it is reached and does not answer in time (`ReplyTimeout`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from leyden.api.views import Fleet, RolloutListing, RolloutQuery, RunCard, Series
from leyden.api.wire import (
    CallTimes,
    CancelReply,
    Counted,
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
    RunSpec,
    RunSummary,
    Scores,
    ScoringHeartbeat,
    ScoringRequest,
    TimeoutReply,
    TimeoutRequest,
)
from leyden.config import ConfigError
from leyden.decoding import NotJson, decode_json, decode_text
from leyden.episodes import Episode
from leyden.records import Call, EventKind, Group, Metric, Reward, Run, StepCredits, Version

T = TypeVar("T")

_JSON = "application/json"
_MSGPACK = "application/msgpack"
_CONNECT_TIMEOUT_S = 10.0
_REPLY_TIMEOUT_S = 330.0
"""Longer than the longest `wait` of a request."""


class RemoteError(Exception):
    """The server refused a request. `status` and `reason` classify the refusal; the message explains it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def is_temporary(self) -> bool:
        """Whether the server failed or is busy: the same request may succeed later. Workers and trainers repeat it."""
        return self.status >= 500 or self.status in (408, 429)


class ServerUnreachable(ConnectionError):
    """The connection to the server could not be made, or broke."""


class ReplyTimeout(TimeoutError):
    """The server was connected but did not reply in time. It may still carry out the request."""


class Remote:
    """A server and the key to use with it. Use it as an async context manager."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"accept": _MSGPACK, **({"authorization": f"Bearer {key}"} if key else {})}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=_REPLY_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def request(
        self, method: str, path: str, returns: type[T], body: Any = None, **query: str | float | None
    ) -> T:
        """Send one request and decode its reply."""
        data, content_type = _encode(body)
        params = {name: value for name, value in query.items() if value is not None}
        headers = {"content-type": content_type}
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=headers, params=params
            ) as response:
                reply = await response.read()
        except aiohttp.ConnectionTimeoutError as error:
            raise ServerUnreachable(f"cannot reach the server at {self.url} ({error})") from error
        except TimeoutError as error:
            raise ReplyTimeout(f"the server at {self.url} did not answer within {_REPLY_TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"cannot reach the server at {self.url} ({error})") from error
        if response.status >= 400:
            raise _error(response.status, reply)
        try:
            if response.content_type == _MSGPACK:
                return msgspec.msgpack.decode(reply, type=returns)
            return decode_json(reply or b"null", returns)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotJson) as error:
            raise RemoteError(
                response.status, "unknown", f"{self.url} does not answer like a Leyden server of this version: {error}"
            ) from error

    # Runs

    async def runs(self) -> list[RunSummary]:
        """List the runs that the key may see."""
        return await self.request("GET", "/api/runs", list[RunSummary])

    async def create_run(self, spec: RunSpec) -> Run:
        """Create a run, idempotently."""
        return await self.request("POST", "/api/runs", Run, spec)

    async def run(self, run: str) -> Run:
        """Return a run with its configuration."""
        return await self.request("GET", f"/api/runs/{run}", Run)

    async def summary(self, run: str) -> RunSummary:
        """Return the counts and mean reward of a run."""
        return await self.request("GET", f"/api/runs/{run}/summary", RunSummary)

    async def delete_run(self, run: str) -> None:
        """Delete a run with everything recorded for it."""
        await self.request("DELETE", f"/api/runs/{run}", type(None))

    async def events(self, run: str, after: int = 0, wait: float = 0.0, kind: EventKind | None = None) -> EventLog:
        """Return the events after a cursor, waiting up to `wait` seconds for the first."""
        return await self.request("GET", f"/api/runs/{run}/events", EventLog, after=after, wait=wait, kind=kind)

    async def metrics(self, run: str, after: int = 0) -> Metrics:
        """Return the metrics after a cursor."""
        return await self.request("GET", f"/api/runs/{run}/metrics", Metrics, after=after)

    async def record_metrics(self, run: str, metrics: Sequence[Metric]) -> Recorded:
        """Record metrics of a run."""
        return await self.request("POST", f"/api/runs/{run}/metrics", Recorded, metrics)

    async def record_credits(self, run: str, credits: StepCredits) -> Recorded:
        """Record what a training step computed for calls; repeating it overwrites."""
        return await self.request("POST", f"/api/runs/{run}/credits", Recorded, credits)

    async def hold_calls(self, run: str, policy: str) -> HoldReply:
        """Start no model call of a policy until its next version is published; return how many calls wait."""
        return await self.request("POST", f"/api/runs/{run}/policies/{policy}/hold", HoldReply)

    async def call_times(self, run: str) -> CallTimes:
        """Return how long the model calls of a run have taken in the server, and at what."""
        return await self.request("GET", f"/api/runs/{run}/call_times", CallTimes)

    async def publish_version(self, run: str, version: Version) -> Recorded:
        """Record that a version of the weights is being served; calls that were held for it resume."""
        return await self.request("POST", f"/api/runs/{run}/versions", Recorded, version)

    # Groups and rollouts

    async def enqueue(self, run: str, spec: GroupSpec) -> Group:
        """Queue a group of rollouts, idempotently."""
        return await self.request("POST", f"/api/runs/{run}/groups", Group, spec)

    async def group_episodes(self, run: str, group: str) -> list[Episode]:
        """Return the episode of the latest attempt of each rollout of a group."""
        return await self.request("GET", f"/api/runs/{run}/groups/{group}/episodes", list[Episode])

    async def cancel_group(self, run: str, group: str) -> CancelReply:
        """Cancel the unfinished rollouts of a group."""
        return await self.request("POST", f"/api/runs/{run}/groups/{group}/cancel", CancelReply)

    async def rollouts(self, run: str, after: str = "", limit: int = 100) -> list[ListedRollout]:
        """List rollouts in the order in which they were queued."""
        return await self.request("GET", f"/api/runs/{run}/rollouts", list[ListedRollout], after=after, limit=limit)

    async def search(self, run: str, query: RolloutQuery) -> RolloutListing:
        """Return a page of the rollouts that match a query, and how many match."""
        return await self.request("GET", f"/api/runs/{run}/search", RolloutListing, **msgspec.to_builtins(query))

    async def cards(self) -> list[RunCard]:
        """Return state, step and reward of every run, newest first."""
        return await self.request("GET", "/api/overview", list[RunCard])

    async def card(self, run: str) -> RunCard:
        """Return state, step and reward of a run."""
        return await self.request("GET", f"/api/runs/{run}/card", RunCard)

    async def fleet(self) -> Fleet:
        """Return workers, engines, active attempts and the queue."""
        return await self.request("GET", "/api/fleet", Fleet)

    async def series(self, run: str, names: Sequence[str], points: int) -> dict[str, Series]:
        """Return metrics by step, each in at most so many points."""
        path = f"/api/runs/{run}/series"
        return await self.request("GET", path, dict[str, Series], names=",".join(names), points=points)

    async def rollout(self, run: str, rollout: str) -> RolloutDetail:
        """Return a rollout with its task and attempts."""
        return await self.request("GET", f"/api/runs/{run}/rollouts/{rollout}", RolloutDetail)

    async def credits(self, run: str, rollout: str) -> list[StepCredits]:
        """Return what training computed for each call of a rollout, or why it was left out."""
        return await self.request("GET", f"/api/runs/{run}/rollouts/{rollout}/credits", list[StepCredits])

    async def cancel_rollout(self, run: str, rollout: str) -> CancelReply:
        """Cancel a rollout."""
        return await self.request("POST", f"/api/runs/{run}/rollouts/{rollout}/cancel", CancelReply)

    async def episode(self, run: str, attempt: str) -> Episode:
        """Return everything recorded for an attempt."""
        return await self.request("GET", f"/api/runs/{run}/attempts/{attempt}", Episode)

    # Leases

    async def lease(self, request: LeaseRequest) -> list[Lease]:
        """Lease rollouts, waiting up to `request.wait` seconds for one."""
        return await self.request("POST", "/api/lease", list[Lease], request)

    async def withdraw(self, worker: str) -> None:
        """End the waiting lease requests of a worker that takes no more work."""
        await self.request("POST", f"/api/workers/{worker}/withdraw", type(None))

    async def heartbeat(self, worker: str, attempts: Sequence[str]) -> HeartbeatReply:
        """Renew the leases of attempts."""
        return await self.request(
            "POST", f"/api/workers/{worker}/beat", HeartbeatReply, HeartbeatRequest(tuple(attempts))
        )

    async def record_calls(self, run: str, attempt: str, calls: Sequence[Call]) -> Recorded:
        """Record model calls."""
        return await self.request("POST", f"/api/runs/{run}/attempts/{attempt}/calls", Recorded, calls)

    async def record_rewards(self, run: str, attempt: str, rewards: Sequence[Reward]) -> Recorded:
        """Record rewards."""
        return await self.request("POST", f"/api/runs/{run}/attempts/{attempt}/rewards", Recorded, rewards)

    async def finish(self, run: str, attempt: str, report: FinishRequest) -> FinishReply:
        """Report the end of an attempt."""
        return await self.request("POST", f"/api/runs/{run}/attempts/{attempt}/finish", FinishReply, report)

    async def time_out(self, run: str, attempt: str, request: TimeoutRequest) -> TimeoutReply:
        """Return the time that an attempt has left; if none, its model calls are cut and recorded."""
        return await self.request("POST", f"/api/runs/{run}/attempts/{attempt}/timeout", TimeoutReply, request)

    async def lease_scoring(self, request: ScoringRequest) -> list[GroupScoring]:
        """Lease a group to score, waiting up to `request.wait` seconds for one."""
        return await self.request("POST", "/api/scorings", list[GroupScoring], request)

    async def heartbeat_scoring(self, run: str, group: str, number: int) -> Counted:
        """Renew the lease of a group scoring."""
        return await self.request("POST", f"/api/runs/{run}/groups/{group}/beat", Counted, ScoringHeartbeat(number))

    async def score(self, run: str, group: str, scores: Scores) -> Counted:
        """Report the rewards of a scored group."""
        return await self.request("POST", f"/api/runs/{run}/groups/{group}/scores", Counted, scores)

    async def make_key(self, spec: KeySpec) -> NewKey:
        """Create a key."""
        return await self.request("POST", "/api/keys", NewKey, spec)


def read_key(path: Path) -> str:
    """Read a key from its file."""
    try:
        return path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not the file of a key: an admin.key is written again by its server") from error


def _encode(body: Any) -> tuple[bytes | None, str]:
    if body is None:
        return None, _JSON
    try:
        return msgspec.msgpack.encode(body), _MSGPACK
    except OverflowError:  # an integer of more than 64 bits
        return msgspec.json.encode(body), _JSON


def _error(status: int, data: bytes) -> RemoteError:
    try:
        error = decode_json(data, dict[str, Any])["error"]
        return RemoteError(status, error["type"], error["message"])
    except (NotJson, KeyError, TypeError):
        return RemoteError(status, "unknown", decode_text(data[:200]))
