"""A vLLM whose engine core has died: it fails what it receives until its front end ends, too."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from modelserving import eventually

from leyden.engine.protocol import EngineError, EngineLost, EngineRequest, VllmAddress
from leyden.engine.vllm import http
from leyden.engine.vllm.engine import VllmEngine
from leyden.records import Sampling

REQUEST = EngineRequest((1, 2), Sampling(), (7,), 10, "session")


class FrontEnd:
    """vLLM's front end. It answers with one token, and an error after it where `dies` is given, when that is set."""

    def __init__(self) -> None:
        self.status, self.health_status = 200, 200
        self.dies: asyncio.Event | None = None
        self.asked = 0
        """How often its health was asked."""

    async def health(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(status=self.health_status)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.Response(status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        token = {"token": "token_id:5", "logprob": -0.5, "top_logprobs": []}
        finish = "stop" if self.dies is None else None
        choice = {"index": 0, "token_ids": [5], "logprobs": {"content": [token]}, "finish_reason": finish}
        await response.write(_event({"choices": [choice]}))
        if self.dies is not None:
            await self.dies.wait()
            await response.write(_event({"error": {"message": "EngineCore encountered an issue.", "code": 500}}))
        await response.write(b"data: [DONE]\n\n")
        return response


def _event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


@pytest_asyncio.fixture
async def vllm(tmp_path: Path) -> AsyncIterator[tuple[FrontEnd, VllmEngine]]:
    front_end, app, socket = FrontEnd(), web.Application(), str(tmp_path / "vllm.sock")
    app.router.add_get("/health", front_end.health)
    app.router.add_post("/inference/v1/generate", front_end.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    engine = VllmEngine(VllmAddress(socket, 100, 100, 4))
    yield front_end, engine
    await engine.close()
    await runner.cleanup()


async def _sampled(engine: VllmEngine) -> list[int]:
    return [id async for chunk in engine.generate(REQUEST) for id in chunk.ids]


@pytest.mark.parametrize("healthy", [True, False])
async def test_a_stream_that_ends_with_an_error_is_lost_only_if_vllm_is_not_healthy(
    vllm: tuple[FrontEnd, VllmEngine], healthy: bool
) -> None:
    front_end, engine = vllm
    front_end.dies, front_end.health_status = asyncio.Event(), 200 if healthy else 503
    generation = engine.generate(REQUEST)
    assert (await anext(generation)).ids == (5,)
    front_end.dies.set()
    with pytest.raises(EngineError, match="encountered an issue") as failed:
        await anext(generation)
    assert isinstance(failed.value, EngineLost) is not healthy


async def test_a_new_request_waits_for_a_vllm_that_is_not_healthy(
    vllm: tuple[FrontEnd, VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_RECONNECT_S", 0.01)
    front_end, engine = vllm
    front_end.status, front_end.health_status = 500, 503
    generation = asyncio.create_task(_sampled(engine))
    await eventually(lambda: front_end.asked >= 3)
    engine.hold()  # a weight change does not wait for it
    engine.resume(1)
    asked = front_end.asked
    await eventually(lambda: front_end.asked >= asked + 3)
    front_end.status, front_end.health_status = 200, 200
    assert await generation == [5]


async def test_requests_say_that_they_wait_until_a_restarted_vllm_answers(
    vllm: tuple[FrontEnd, VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_RECONNECT_S", 0.01)
    front_end, engine = vllm
    front_end.status, front_end.health_status = 500, 503
    waiting, later = engine.generate(REQUEST), engine.generate(REQUEST)
    assert (await anext(waiting)).restarting
    front_end.status, front_end.health_status = 200, 200
    assert (await anext(later)).restarting  # it is paused until it has the weights
    assert [(chunk.ids, chunk.restarting) async for chunk in later] == [((5,), False)]
    assert [(chunk.ids, chunk.restarting) async for chunk in waiting] == [((5,), False)]
    assert [chunk.restarting async for chunk in engine.generate(REQUEST)] == [False]


async def test_a_request_does_not_wait_for_ever(
    vllm: tuple[FrontEnd, VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "RESTART_LIMIT_S", 0.0)
    front_end, engine = vllm
    front_end.status, front_end.health_status = 500, 503
    with pytest.raises(EngineLost, match="not healthy"):
        await _sampled(engine)


async def test_a_request_that_a_healthy_vllm_fails_does_not_wait(vllm: tuple[FrontEnd, VllmEngine]) -> None:
    front_end, engine = vllm
    front_end.status = 500
    with pytest.raises(EngineError, match="refused a request") as failed:
        await _sampled(engine)
    assert not isinstance(failed.value, EngineLost)
