"""Rate and concurrency limits per key."""

import asyncio
from contextlib import ExitStack

import aiohttp
import pytest
from serving import ServerProcess

from leyden.api.client import Remote
from leyden.api.wire import GroupSpec, LeaseRequest, RunSpec
from leyden.records import RunSettings, Task
from leyden.server.control.keys import KeyKind
from leyden.server.http.limits import LIMITS, Limit, Limiter, RateLimited, limits_for


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def limiter(clock: Clock, per_second: float = 10, concurrency: int = 1000) -> Limiter:
    return Limiter(dict.fromkeys(KeyKind, Limit(per_second, concurrency, 1, 1.0)), clock)


def admitted(gate: Limiter, id: str = "key", tries: int = 1000) -> int:
    """How many requests in a row are let in."""
    for count in range(tries):
        try:
            with gate.admit(KeyKind.ATTEMPT, id):
                pass
        except RateLimited:
            return count
    return tries


def test_a_key_has_a_burst_of_two_seconds_and_then_its_rate(clock: Clock) -> None:
    gate = limiter(clock)
    assert admitted(gate) == 20
    clock.now = 0.5
    assert admitted(gate) == 5
    clock.now = 1000.0
    assert admitted(gate) == 20


def test_the_requests_that_an_attempt_may_have_at_once_have_a_key(clock: Clock) -> None:
    gate = Limiter(limits_for(512), clock)
    with ExitStack() as active:
        for _ in range(512):
            active.enter_context(gate.admit(KeyKind.ATTEMPT, "key"))
        with pytest.raises(RateLimited, match=r"more than 512 requests at once \(server\.concurrent_calls"):
            gate.admit(KeyKind.ATTEMPT, "key")
    assert gate.limits[KeyKind.ATTEMPT] == Limit(800, 512, 1024, 0.25)
    assert limits_for(128) == LIMITS


def test_a_refusal_says_when_to_retry(clock: Clock) -> None:
    gate = limiter(clock)
    admitted(gate)
    with pytest.raises(RateLimited, match="10 requests a second") as refusal, gate.admit(KeyKind.ATTEMPT, "key"):
        pass
    clock.now += refusal.value.retry_after - 1e-9
    assert admitted(gate) == 0
    clock.now += 2e-9
    assert admitted(gate) == 1


def test_being_refused_costs_nothing(clock: Clock) -> None:
    gate = limiter(clock)
    admitted(gate)
    for _ in range(100):
        assert admitted(gate) == 0
    clock.now = 1.0
    assert admitted(gate) == 10


def test_keys_do_not_share_their_limits(clock: Clock) -> None:
    gate = limiter(clock)
    assert admitted(gate, "one") == 20
    assert admitted(gate, "two") == 20


def test_a_key_has_so_many_requests_concurrency(clock: Clock) -> None:
    gate = limiter(clock, concurrency=3)
    with ExitStack() as open_requests:
        for _ in range(3):
            open_requests.enter_context(gate.admit(KeyKind.ATTEMPT, "key"))
        with pytest.raises(RateLimited, match="3 requests at once"), gate.admit(KeyKind.ATTEMPT, "key"):
            pass
        with gate.admit(KeyKind.ATTEMPT, "another"):
            pass
    with gate.admit(KeyKind.ATTEMPT, "key"):
        pass


def test_a_request_that_fails_no_longer_counts(clock: Clock) -> None:
    gate = limiter(clock, concurrency=1)
    for _ in range(5):
        with pytest.raises(RuntimeError), gate.admit(KeyKind.ATTEMPT, "key"):
            raise RuntimeError
    assert admitted(gate, tries=1) == 1


def test_idle_keys_are_forgotten_and_busy_ones_are_not(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limiter, "_MAX_KEYS", 10)
    gate = limiter(clock, concurrency=1)
    with gate.admit(KeyKind.ATTEMPT, "busy"):
        for number in range(1000):
            assert admitted(gate, f"passing {number}", tries=1) == 1
        assert len(gate._usage) <= 11
        with pytest.raises(RateLimited), gate.admit(KeyKind.ATTEMPT, "busy"):
            pass


def test_every_kind_of_key_has_a_limit() -> None:
    assert set(LIMITS) == set(KeyKind)


async def test_a_runaway_agent_is_rate_limited_and_no_other_is(server: ServerProcess, remote: Remote) -> None:
    await remote.create_run(RunSpec("wild", RunSettings(lease_s=3600)))
    await remote.enqueue("wild", GroupSpec("wild-g", Task("t", None), size=2))
    wild, calm = await remote.lease(LeaseRequest("w", 2, run="wild"))
    asked = 0
    refusals: list[aiohttp.ClientResponse] = []

    async def ask(session: aiohttp.ClientSession, key: str) -> aiohttp.ClientResponse:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/x-protobuf"}
        async with session.post(f"{server.url}/v1/traces", headers=headers) as reply:
            await reply.read()
            return reply

    async def run_wild(session: aiohttp.ClientSession) -> None:
        nonlocal asked
        while not refusals and asked < 20_000:
            asked += 1
            reply = await ask(session, wild.key)
            if reply.status != 200:
                refusals.append(reply)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(run_wild(session) for _ in range(20)))
        assert asked > 400  # two seconds' worth
        assert {reply.status for reply in refusals} == {429}
        assert int(refusals[0].headers["retry-after"]) >= 1
        assert (await ask(session, calm.key)).status == 200
    assert (await remote.get_run("wild")).id == "wild"
