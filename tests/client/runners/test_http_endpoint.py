"""Agents behind an HTTP endpoint: what they receive, and the outcome of every kind of response."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from worker_harness import WorkerHarness

from leyden.outcomes import Ending


class Service:
    """An agent behind HTTP that does what its task says."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.hung_up = asyncio.Event()

    async def act(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.received.append({**body, "header": request.headers["traceparent"]})
        match body["task"]["do"]:
            case "ask":
                return web.json_response({"result": await ask(body), "reward": 0.25})
            case "number":
                return web.json_response(0.75)
            case "latin":
                return web.Response(body=b'{"reward": 0.5, "result": "caf\xe9"}')
            case "latin failure":
                return web.Response(status=500, body=b"caf\xe9")
            case "large":
                return web.json_response({"result": "x" * (5 << 20), "reward": 1})
            case "nothing":
                return web.Response()
            case "fail":
                return web.Response(status=500, text="the database is gone")
            case "prose":
                return web.Response(text="I think it is 7.")
            case "break off":
                answer = web.StreamResponse(headers={"content-length": "100"})
                await answer.prepare(request)
                await answer.write(b"{")
                request.transport.abort()
                return answer
            case "crash":
                request.transport.abort()
                return web.Response()
            case "hang":
                try:
                    await asyncio.sleep(600)
                finally:
                    self.hung_up.set()
        raise NotImplementedError(body)


async def ask(body: dict[str, Any]) -> int:
    question = {"model": "any", "messages": [{"role": "user", "content": f"Say number {body['task']['n']}"}]}
    headers = {"authorization": f"Bearer {body['key']}"}
    async with (
        aiohttp.ClientSession(headers=headers, raise_for_status=True) as session,
        session.post(f"{body['base_url']}/chat/completions", json=question) as answer,
    ):
        return int((await answer.json())["choices"][0]["message"]["content"])


async def status_of_asking(body: dict[str, Any]) -> int:
    try:
        return await ask({**body, "task": {"n": 1}})
    except aiohttp.ClientResponseError as error:
        return error.status


@asynccontextmanager
async def serving(listener: socket.socket) -> AsyncIterator[Service]:
    service, app = Service(), web.Application()
    app.router.add_post("/act", service.act)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    try:
        yield service
    finally:
        await runner.cleanup()


def bind_endpoint() -> tuple[socket.socket, str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}/act"


async def test_an_endpoint_receives_all_it_needs_and_every_response_has_its_outcome(harness: WorkerHarness) -> None:
    await harness.open()
    names = ("ask", "number", "nothing", "fail", "prose", "break off", "latin", "latin failure", "large")
    for name in names:
        await harness.queue(name.replace(" ", "-"), {"do": name, "n": 5})
    listener, url = bind_endpoint()
    async with serving(listener) as service:
        with harness.worker(url, concurrency=2):
            found = {name: await harness.episode(name.replace(" ", "-")) for name in names}
    outcomes = {name: episode.attempt.outcome for name, episode in found.items()}
    assert {name: str(outcome.ending) for name, outcome in outcomes.items() if outcome} == {
        "ask": "succeeded",
        "number": "succeeded",
        "nothing": "no_reward",
        "fail": "agent_error",
        "prose": "agent_error",
        "break off": "agent_error",
        "latin": "succeeded",
        "latin failure": "agent_error",
        "large": "agent_error",
    }
    asked = found["ask"]
    assert (asked.attempt.result, asked.final_reward(-1.0), len(asked.calls)) == (5, 0.25, 1)
    assert found["number"].final_reward(-1.0) == 0.75
    assert found["latin"].attempt.result == "caf\N{REPLACEMENT CHARACTER}"
    assert outcomes["latin failure"] and "500: caf\N{REPLACEMENT CHARACTER}" in outcomes["latin failure"].message
    assert outcomes["fail"] and outcomes["fail"].message == f"{url} answered 500: the database is gone"
    assert outcomes["large"] and "more than 4,194,304 bytes" in outcomes["large"].message
    assert outcomes["prose"] and "not JSON" in outcomes["prose"].message
    (told,) = [body for body in service.received if body["task"]["do"] == "ask"]
    assert (told["attempt"], told["base_url"]) == ("ask.0.1", f"{harness.server.url}/v1")
    assert told["traceparent"] == told["header"] and asked.attempt.trace_id in told["header"]


async def test_an_endpoint_is_not_charged_for_a_failure_of_the_engine(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=1, failure_reward=-1.0)
    harness.server.engine.script = lambda _: (-1,)
    await harness.queue("g", {"do": "ask", "n": 5})
    listener, url = bind_endpoint()
    async with serving(listener):
        with harness.worker(url):
            episode = await harness.episode("g")
    outcome = episode.attempt.outcome
    assert outcome and outcome.ending is Ending.ENGINE_ERROR and episode.final_reward(-1.0) is None
    assert outcome.message.startswith("the engine failed: ") and f"\n{url} answered 500" in outcome.message


async def test_a_task_is_sent_once_in_an_attempt_even_if_the_endpoint_crashes(harness: WorkerHarness) -> None:
    await harness.open(max_attempts=2)
    await harness.queue("g", {"do": "crash"})
    listener, url = bind_endpoint()
    async with serving(listener) as service:
        with harness.worker(url):
            episode = await harness.episode("g")
    assert [body["attempt"] for body in service.received] == ["g.0.1", "g.0.2"]
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.LOST
    assert "closed the connection without an answer" in episode.attempt.outcome.message


async def test_a_time_limit_cancels_the_request_and_the_key_ends_with_the_attempt(harness: WorkerHarness) -> None:
    await harness.open()
    await harness.queue("g", {"do": "hang"})
    listener, url = bind_endpoint()
    async with serving(listener) as service:
        with harness.worker(url, time_limit_s=2.0):
            episode = await harness.episode("g")
            await asyncio.wait_for(service.hung_up.wait(), 60)
            body = service.received[0]
            assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.TIMEOUT
            assert await status_of_asking(body) in (401, 403)


async def test_an_endpoint_that_is_down_loses_attempts_and_one_that_starts_late_does_not(
    harness: WorkerHarness,
) -> None:
    await harness.open(max_attempts=1)
    await harness.queue("away", {"do": "number"})
    listener, url = bind_endpoint()  # nothing listens yet
    with harness.worker(url, concurrency=1):
        away = await harness.episode("away")
        assert away.attempt.outcome and away.attempt.outcome.ending is Ending.LOST
        assert "does not answer" in away.attempt.outcome.message
        await harness.queue("late", {"do": "number"})
        await harness.event("attempt.started", "late.0.1")
        async with serving(listener):
            assert (await harness.episode("late")).final_reward(-1.0) == 0.75
