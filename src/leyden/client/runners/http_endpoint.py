"""Runs an agent behind an HTTP endpoint: posts the task and reads the result from the response.

The agent runs elsewhere and cannot be killed from here; the key of an attempt is invalid once the attempt has ended.
"""

import asyncio
import logging
from collections.abc import Callable

import aiohttp
import msgspec

from leyden.api.wire import FinishRequest, Lease
from leyden.background import start_background
from leyden.backoff import Backoff
from leyden.client.attempt.outcome import end_of_attempt, result_from_json
from leyden.client.attempt.result import MAX_ANSWER_BYTES
from leyden.client.host_protocol import CodeReturned, HostSetup, StopReply
from leyden.client.services.registry import addressed_services
from leyden.decoding import NotJson, decode_json, decode_text
from leyden.outcomes import Ending, Outcome
from leyden.urls import without_userinfo

_log = logging.getLogger("leyden.worker")
_MAX_MESSAGE = 2000
_BACKOFF, _MAX_TRIES = Backoff(first_s=0.1, max_s=2.0), 6
_NOT_ANSWERED = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, ConnectionError)


class HttpEndpoint:
    """A `Runner` that sends each attempt to an HTTP endpoint."""

    pool: str | None = None
    stop_timeout_s = 10.0
    max_concurrency: int | None = None

    def __init__(self, setup: HostSetup) -> None:
        self._setup = setup
        self.services = addressed_services(setup.services)
        # A new connection for each attempt: an endpoint may close an idle one at any time, and the next would be lost.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._on_event: Callable[[CodeReturned], None] | None = None

    def start_attempt(self, lease: Lease) -> None:
        """Start an attempt."""
        self._requests[lease.id] = start_background(self._run(lease), f"attempt {lease.id}")

    async def stop(self, attempt: str) -> StopReply:
        """Cancel the request of an attempt. Its output is not known here."""
        task = self._requests.get(attempt)
        if task is not None:
            task.cancel()
        return StopReply(attempt)

    async def flush_spans(self, attempt: str) -> None:
        """Do nothing: the agent exports its spans itself."""

    async def listen(self, on_event: Callable[[CodeReturned], None]) -> None:
        """Call `on_event` for every attempt that has ended."""
        self._on_event = on_event
        await asyncio.get_running_loop().create_future()

    async def is_responsive(self, timeout_s: float) -> bool:
        """Return True: no agent code runs here."""
        return True

    async def find_blocker(self) -> str | None:
        """Return None: no agent code runs here."""
        return None

    async def exit_reason(self) -> str:
        """Return the only reason: it ends with its worker."""
        return "the worker ended"

    def output(self) -> str:
        """Return nothing: the agent prints elsewhere."""
        return ""

    async def close(self, *, kill: bool = False) -> None:
        """Cancel all requests."""
        for task in list(self._requests.values()):
            task.cancel()
        await self._session.close()

    async def _run(self, lease: Lease) -> None:
        try:
            end = await self._post(lease)
        except asyncio.CancelledError:
            end = FinishRequest(Outcome(Ending.CANCELLED, "stopped by its worker"))
        except Exception as error:  # a bug here must not leave the attempt without an end
            _log.exception("attempt %s failed in the worker", lease.id)
            end = FinishRequest(Outcome(Ending.LOST, f"the worker failed: {type(error).__name__}: {error}"))
        del self._requests[lease.id]
        assert self._on_event is not None
        self._on_event(CodeReturned(lease.id, end))

    async def _post(self, lease: Lease) -> FinishRequest:
        body = {
            "task": lease.task.input,
            "attempt": lease.id,
            "base_url": f"{self._setup.server}/v1",
            "key": lease.key,
            "traceparent": lease.traceparent,
            **({"services": lease.services} if lease.services else {}),
        }
        headers = {"content-type": "application/json", "traceparent": lease.traceparent}
        tries = 0
        while True:
            tries += 1
            try:
                async with self._session.post(
                    self._setup.agent, data=msgspec.json.encode(body), headers=headers
                ) as response:
                    return self._read(response.status, await _read_bounded(response))
            except aiohttp.ClientConnectorError as error:  # it may be about to start
                if tries == _MAX_TRIES:
                    return self._lost(f"does not answer: {error}")
                await _BACKOFF.wait(tries)
            except _NOT_ANSWERED as error:  # the agent may have run: to send it again would run it twice in one attempt
                return self._lost(f"closed the connection without an answer: {error}")
            except aiohttp.ClientError as error:
                return self._failed(f"closed the connection: {error}")

    def _read(self, status: int, data: bytes) -> FinishRequest:
        if len(data) > MAX_ANSWER_BYTES:
            return self._failed(f"answered with more than {MAX_ANSWER_BYTES:,} bytes")
        if status >= 300:
            return self._failed(f"answered {status}: {decode_text(data[:_MAX_MESSAGE])}")
        try:
            document = decode_json(data) if data.strip() else None
        except NotJson as error:
            shown = decode_text(data[:_MAX_MESSAGE])
            return self._failed(f"answered with something that is not JSON ({error}): {shown}")
        return end_of_attempt(result_from_json(document), self._setup)

    def _lost(self, reason: str) -> FinishRequest:
        return FinishRequest(Outcome(Ending.LOST, f"{without_userinfo(self._setup.agent)} {reason}"))

    def _failed(self, reason: str) -> FinishRequest:
        return FinishRequest(Outcome(Ending.AGENT_ERROR, f"{without_userinfo(self._setup.agent)} {reason}"))


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Read a body up to a little more than the limit, so that the caller sees that it is too large."""
    data = bytearray()
    async for chunk in response.content.iter_any():
        data += chunk
        if len(data) > MAX_ANSWER_BYTES:
            break
    return bytes(data)
