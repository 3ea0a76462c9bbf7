"""An agent behind an HTTP endpoint: the worker posts the task, and what comes back is what the agent returned.

Nothing of it runs here, so nothing can be killed here: an attempt that is over takes its key with it.
"""

import asyncio
from collections.abc import Callable, Mapping

import aiohttp
import msgspec

from leyden.client.attempt.outcome import ended_with, from_json
from leyden.client.attempt.result import LONGEST_RESULT
from leyden.client.host_protocol import AttemptEnd, HostSetup, HostStopping
from leyden.client.services.registry import lent_by_address
from leyden.outcomes import Ending, Outcome
from leyden.wire import Lease

_LONGEST_ANSWER, _LONGEST_MESSAGE = 4 * LONGEST_RESULT, 2000
_PAUSES_S = (0.1, 0.5, 2.0)
_UNANSWERED = (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionError)


class HttpEndpoint:
    """Runs attempts by asking elsewhere."""

    pool: str | None = None
    return_s = 10.0
    at_once: int | None = None

    def __init__(self, setup: HostSetup) -> None:
        self._setup = setup
        self.services = lent_by_address(setup.services)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._hear: Callable[[AttemptEnd], None] | None = None

    def run(self, lease: Lease, lent: Mapping[str, str]) -> None:
        """Begin an attempt."""
        self._asking[lease.attempt.id] = asyncio.create_task(self._run(lease, lent))

    async def stop(self, attempt: str) -> HostStopping:
        """Hang up; what it printed is known elsewhere."""
        task = self._asking.get(attempt)
        if task is not None:
            task.cancel()
        return HostStopping(attempt)

    async def listen(self, hear: Callable[[AttemptEnd], None]) -> None:
        """Hear of every attempt that was answered."""
        self._hear = hear
        await asyncio.get_running_loop().create_future()

    async def answers(self, within_s: float) -> bool:
        """Nothing of the agent runs here, so nothing is blocked here."""
        return True

    async def blocker(self) -> str | None:
        """Nobody."""
        return None

    async def death(self) -> str:
        """It goes with its worker only."""
        return "the worker ended"

    def output(self) -> str:
        """What it prints is known elsewhere."""
        return ""

    async def close(self, *, at_once: bool = False) -> None:
        """Hang up on all."""
        for task in list(self._asking.values()):
            task.cancel()
        await self._session.close()

    async def _run(self, lease: Lease, lent: Mapping[str, str]) -> None:
        attempt = lease.attempt.id
        try:
            ended = await self._ask(lease, lent)
        except asyncio.CancelledError:
            ended = AttemptEnd(attempt, Outcome(Ending.CANCELLED, "stopped by its worker"))
        del self._asking[attempt]
        assert self._hear is not None
        self._hear(ended)

    async def _ask(self, lease: Lease, lent: Mapping[str, str]) -> AttemptEnd:
        attempt = lease.attempt.id
        body = {
            "task": lease.task.input,
            "attempt": attempt,
            "base_url": f"{self._setup.server}/v1",
            "key": lease.key,
            "traceparent": lease.traceparent,
            **({"services": lent} if lent else {}),
        }
        headers = {"content-type": "application/json", "traceparent": lease.traceparent}
        for pause in (*_PAUSES_S, None):
            try:
                async with self._session.post(
                    self._setup.agent, data=msgspec.json.encode(body), headers=headers
                ) as answer:
                    return self._read(attempt, answer.status, await _bounded(answer))
            except _UNANSWERED as error:  # it may just be starting
                if pause is None:
                    return AttemptEnd(attempt, Outcome(Ending.LOST, f"{self._setup.agent} does not answer: {error}"))
                await asyncio.sleep(pause)
            except aiohttp.ClientError as error:
                return self._failed(attempt, f"broke off: {error}")
        raise AssertionError("the last try returns")

    def _read(self, attempt: str, status: int, data: bytes) -> AttemptEnd:
        if len(data) > _LONGEST_ANSWER:
            return self._failed(attempt, f"answered with more than {_LONGEST_ANSWER} bytes")
        if status >= 300:
            return self._failed(attempt, f"answered {status}: {data[:_LONGEST_MESSAGE].decode(errors='replace')}")
        try:
            document = msgspec.json.decode(data) if data.strip() else None
        except (msgspec.DecodeError, RecursionError) as error:
            shown = data[:_LONGEST_MESSAGE].decode(errors="replace")
            return self._failed(attempt, f"answered with something that is not JSON ({error}): {shown}")
        return ended_with(attempt, from_json(document), self._setup.scored)

    def _failed(self, attempt: str, how: str) -> AttemptEnd:
        return AttemptEnd(attempt, Outcome(Ending.AGENT_ERROR, f"{self._setup.agent} {how}"))


async def _bounded(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > _LONGEST_ANSWER:
            break
    return bytes(data)
