"""The time limit of an attempt: the server decides when it is over, and its model calls are recorded before it ends."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from modelserving import END, eventually
from openai import AsyncOpenAI
from worker_harness import WorkerHarness

from leyden.api.wire import FinishRequest, Lease
from leyden.client.attempt.active_attempt import ActiveAttempt, TimeLimit
from leyden.engine.protocol import EngineRequest, TokenChunk
from leyden.outcomes import Ending, Outcome
from leyden.records import Attempt, CallStatus, Purpose, Task

RETURNED = FinishRequest(Outcome(Ending.SUCCEEDED), output="printed")


def active_attempt() -> ActiveAttempt:
    attempt = Attempt("g.0.1", "r", "g.0", 1, "w", None, 0.0, 60.0)
    return ActiveAttempt(Lease(attempt, Task("t", {}), Purpose.TRAIN, 60.0, "", "", ""))


async def test_an_attempt_has_the_time_that_the_server_says_is_left() -> None:
    asked: list[float] = []

    async def time_out(lease: Lease, ran_s: float) -> float:
        asked.append(ran_s)
        return 0.2 if len(asked) < 3 else 0.0

    limit = TimeLimit(active_attempt(), 0.1, time_out)
    assert await limit.wait_end() is limit.timeout
    assert len(asked) == 3
    assert asked[0] >= 0.1 and asked[1] >= asked[0] + 0.2 and asked[2] >= asked[1] + 0.2


@pytest.mark.parametrize("left_s", [0.0, 5.0])
async def test_code_that_returns_while_the_server_is_asked_ends_as_the_answer_says(left_s: float) -> None:
    active, asked, answered = active_attempt(), asyncio.Event(), asyncio.Event()

    async def time_out(lease: Lease, ran_s: float) -> float:
        asked.set()
        await answered.wait()
        return left_s

    limit = TimeLimit(active, 0.01, time_out)
    waiting = asyncio.create_task(limit.wait_end())
    await asked.wait()
    active.resolve(RETURNED)
    await asyncio.sleep(0)
    assert not waiting.done()
    answered.set()
    end = await waiting
    assert end is not None
    assert end.outcome.ending is (Ending.SUCCEEDED if left_s else Ending.TIMEOUT)
    assert end.output == "printed"


async def test_code_that_returns_in_time_asks_nobody() -> None:
    active = active_attempt()

    async def time_out(lease: Lease, ran_s: float) -> float:
        raise AssertionError("not reached")

    active.resolve(RETURNED)
    assert await TimeLimit(active, 60.0, time_out).wait_end() is RETURNED


def ramble(harness: WorkerHarness) -> None:
    """Let the model say a long text slowly."""
    harness.server.say = lambda _: "word " * 500
    harness.server.engine.delay_s, harness.server.engine.chunk_tokens = 0.02, 1


async def act(request: web.Request) -> web.Response:
    """An agent behind HTTP that asks the model once."""
    body = await request.json()
    async with AsyncOpenAI(base_url=body["base_url"], api_key=body["key"], max_retries=0) as client:
        question: Any = [{"role": "user", "content": "Say number 3"}]
        answer = await client.chat.completions.create(model="any", messages=question)
    return web.json_response(float(answer.choices[0].message.content or "nan"))


@pytest.mark.parametrize("agent", ["asking.py:solve", "asking.py:solve_async", "./ask.sh", "endpoint"])
async def test_an_attempt_that_times_out_inside_a_call_leaves_a_cut_call(
    harness: WorkerHarness, agent: str, aiohttp_endpoint: str
) -> None:
    ramble(harness)
    await harness.open(failure_reward=-1.0)
    await harness.queue("g", {"n": 3})
    with harness.worker(aiohttp_endpoint if agent == "endpoint" else agent, time_limit_s=4.0):
        episode = await harness.episode("g")
    assert episode.attempt.outcome is not None
    assert episode.attempt.outcome.ending is Ending.TIMEOUT, episode.attempt.outcome
    assert episode.calls
    for call in episode.calls:
        assert (call.status, call.untrainable) == (CallStatus.CUT, None)
        assert call.logprobs and len(call.logprobs) == len(call.completion_ids)
    assert episode.final_reward(-1.0) == -1.0


@pytest.fixture
async def aiohttp_endpoint() -> Any:
    app = web.Application()
    app.router.add_post("/act", act)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/act"
    await runner.cleanup()


async def test_an_attempt_is_not_charged_for_the_time_that_its_call_was_held(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    await harness.open()
    assert harness.server.service.gateway is not None
    model = harness.server.service.gateway.models["spark"]
    harness.server.say = lambda _: "3" + END
    model.hold()
    await harness.queue("g", {"n": 3, "here": str(tmp_path)})
    (tmp_path / "go").touch()
    with harness.worker("posted.py:solve", time_limit_s=3.0):
        await eventually(lambda: model.scheduler.waiting == 1)
        await asyncio.sleep(4.0)  # longer than the limit
        model.resume(1)
        episode = await harness.episode("g")
    assert episode.attempt.outcome is not None
    assert episode.attempt.outcome.ending is Ending.SUCCEEDED, episode.attempt.outcome
    assert episode.attempt.ended is not None and episode.attempt.ended - episode.attempt.started > 4.0


async def test_an_attempt_is_not_charged_for_a_restart_of_the_engine(
    harness: WorkerHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.open()
    gateway, engine = harness.server.service.gateway, harness.server.engine
    assert gateway is not None
    generate, time_out, restarted, left = engine.generate, gateway.time_out, asyncio.Event(), list[float]()

    async def generate_later(request: EngineRequest) -> AsyncIterator[TokenChunk]:
        yield TokenChunk((), (), 0, restarting=True)
        await restarted.wait()
        async for chunk in generate(request):
            yield chunk

    async def time_out_noted(*asked: Any) -> float:
        left.append(await time_out(*asked))
        return left[-1]

    monkeypatch.setattr(engine, "generate", generate_later)
    monkeypatch.setattr(gateway, "time_out", time_out_noted)
    harness.server.say = lambda _: "3" + END
    await harness.queue("g", {"n": 3, "here": str(tmp_path)})
    (tmp_path / "go").touch()
    with harness.worker("posted.py:solve", time_limit_s=3.0):
        await eventually(lambda: len(left) >= 2)
        restarted.set()
        episode = await harness.episode("g")
    assert episode.attempt.outcome is not None
    assert episode.attempt.outcome.ending is Ending.SUCCEEDED, episode.attempt.outcome
