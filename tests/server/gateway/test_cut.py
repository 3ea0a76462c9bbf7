"""A rollout that reaches its limit inside a call: what was sampled is recorded as cut, and waiting is not charged."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai
import pytest
from modelserving import END, ModelServer, eventually, model_server

from leyden.api.client import Remote, RemoteError
from leyden.api.wire import FinishRequest, TimeoutRequest
from leyden.engine.protocol import EngineRequest, TokenChunk
from leyden.outcomes import Ending, Outcome
from leyden.records import CallStatus, Sampling
from leyden.server.control.keys import KeyKind
from leyden.server.gateway.calls import recorder
from leyden.server.gateway.calls.caller import Caller
from leyden.server.gateway.dialects.types import AnswerStarted, GenerationRequest
from leyden.store.errors import Conflict, StoreUnavailable

ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "Tell me a story."}]}
OVER = TimeoutRequest(ran_s=10.0, limit_s=10.0)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ModelServer]:
    async with model_server(tmp_path) as running:
        running.say = lambda _: "word " * 500
        running.engine.delay_s, running.engine.chunk_tokens = 0.01, 1
        yield running


@pytest.fixture
async def worker(server: ModelServer) -> AsyncIterator[Remote]:
    async with Remote(server.url, server.service.keyring.create(KeyKind.WORKER, 60)[0]) as remote:
        yield remote


def client_of(server: ModelServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0)


async def started(server: ModelServer, tokens: int = 1) -> None:
    """Wait until a call has sampled so many tokens."""
    assert server.service.gateway is not None
    generations = server.service.gateway._attempts
    await eventually(
        lambda: any(
            len(parser.ids) >= tokens
            for attempt in generations.values()
            for call in attempt._in_flight
            for parser in call._parsers
        )
    )


async def read_all(client: openai.AsyncOpenAI, stream: bool) -> Any:
    answer = await client.chat.completions.create(**ASK, stream=stream)
    return [chunk async for chunk in answer] if stream else answer


@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_sampled_at_the_time_limit_is_recorded_and_can_be_trained_on(
    server: ModelServer, worker: Remote, stream: bool
) -> None:
    await server.new_attempt()
    async with client_of(server) as client:
        asking = asyncio.create_task(read_all(client, stream))
        await started(server)
        assert (await worker.time_out(server.run, server.attempt, OVER)).left_s == 0
        (call,) = (await server.episode()).calls  # durable before the reply
        with pytest.raises(openai.APIError, match=r"used its 10 s \(time_limit_s\)"):
            await asking
        with pytest.raises(openai.PermissionDeniedError, match="time_limit_s"):
            await client.chat.completions.create(**ASK)
    assert (call.status, call.finish) == (CallStatus.CUT, "cut")
    assert 0 < len(call.completion_ids) < 500
    assert call.logprobs is not None and len(call.logprobs) == len(call.completion_ids)
    assert call.response["content"].startswith("w")
    assert call.untrainable is None
    await eventually(lambda: server.engine.cancelled == 1)
    assert (await worker.time_out(server.run, server.attempt, OVER)).left_s == 0  # repeating it changes nothing
    await worker.finish(server.run, server.attempt, FinishRequest(Outcome(Ending.TIMEOUT)))
    assert (await server.check(calls=1)).calls == (call,)


async def test_a_call_whose_client_reads_nothing_is_cut_too(server: ModelServer) -> None:
    await server.new_attempt()
    gateway, attempt = server.service.gateway, server.service.leases.get(server.attempt)
    assert gateway is not None and attempt is not None
    request = GenerationRequest("m", tuple(ASK["messages"]), sampling=Sampling(), stream=True)
    async with aclosing(gateway.answer(Caller(attempt), request)) as events:
        assert isinstance(await anext(events), AnswerStarted)
        await anext(events)
        assert await gateway.time_out(attempt, 10.0, 10.0) == 0
        assert [call.status for call in (await server.episode()).calls] == [CallStatus.CUT]
    await server.check(calls=1)


async def test_the_report_of_a_time_out_records_a_call_that_is_still_in_flight(
    server: ModelServer, worker: Remote
) -> None:
    await server.new_attempt()
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await started(server)
        await worker.finish(server.run, server.attempt, FinishRequest(Outcome(Ending.TIMEOUT)))
        with pytest.raises(openai.PermissionDeniedError):
            await asking
    (call,) = (await server.check(calls=1)).calls
    assert call.status is CallStatus.CUT and call.completion_ids


async def test_a_limit_that_is_reached_as_the_attempt_ends_is_no_error(server: ModelServer) -> None:
    await server.new_attempt()
    gateway = server.service.gateway
    assert gateway is not None
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await started(server)
        calls = gateway._attempts[server.attempt]
        await server.service.store.finish(server.run, server.attempt, FinishRequest(Outcome(Ending.LOST)))
        await calls.cut("too late")
        with pytest.raises(openai.PermissionDeniedError):
            await asking
    await server.check(calls=0)


async def test_choices_that_were_complete_at_the_limit_are_whole(server: ModelServer, worker: Remote) -> None:
    await server.new_attempt()
    said = iter(["Short" + END, "word " * 500])
    server.say = lambda _: next(said)
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK, n=2))
        await started(server, tokens=30)  # the first choice has few, and is sampled at the same pace
        await worker.time_out(server.run, server.attempt, OVER)
        with pytest.raises(openai.PermissionDeniedError):
            await asking
    calls = (await server.check(calls=2)).calls
    assert {call.status for call in calls} == {CallStatus.OK, CallStatus.CUT}


async def test_an_answer_that_the_token_budget_ended_is_cut(server: ModelServer) -> None:
    await server.new_attempt(max_tokens=8)
    async with client_of(server) as client:
        own = await client.chat.completions.create(**ASK, max_tokens=3)
        answer = await client.chat.completions.create(**ASK, max_tokens=100)
        assert [one.choices[0].finish_reason for one in (own, answer)] == ["length", "length"]
        with pytest.raises(openai.PermissionDeniedError, match="max_tokens"):
            await client.chat.completions.create(**ASK)
    calls = (await server.check(calls=2)).calls
    assert [(call.status, len(call.completion_ids)) for call in calls] == [(CallStatus.OK, 3), (CallStatus.CUT, 5)]
    assert [call.untrainable for call in calls] == [None, None]


@pytest.mark.parametrize("exceeded", [True, False])
async def test_a_client_that_goes_away_leaves_a_cut_call_only_if_the_budget_was_used_up(
    server: ModelServer, exceeded: bool
) -> None:
    await server.new_attempt(max_calls=1)
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await started(server)
        if exceeded:
            with pytest.raises(openai.PermissionDeniedError, match="max_calls"):
                await client.chat.completions.create(**ASK)
        asking.cancel()
        await eventually(lambda: server.engine.cancelled == 1)
    assert server.service.gateway is not None
    attempt = server.service.gateway._attempts[server.attempt]
    await eventually(lambda: attempt.index.recorded == 1)
    (call,) = (await server.check(calls=1)).calls
    assert call.status is (CallStatus.CUT if exceeded else CallStatus.ABANDONED)


async def test_time_in_the_queue_is_not_charged_even_after_a_restart(server: ModelServer, worker: Remote) -> None:
    await server.new_attempt()
    server.say = lambda _: "Once" + END
    assert server.service.gateway is not None
    model = server.service.gateway.models["spark"]
    model.hold()
    before = time.time()
    async with client_of(server) as client:
        asking = [asyncio.create_task(client.chat.completions.create(**ASK)) for _ in range(2)]
        await eventually(lambda: model.scheduler.waiting == 2)
        since = time.time()
        await asyncio.sleep(0.3)
        waited = (await worker.time_out(server.run, server.attempt, OVER)).left_s
        assert time.time() - before >= waited >= 0.3  # two calls that wait at the same time count once
        model.resume(1)
        resumed = time.time()
        await asyncio.gather(*asking)
        still = (await worker.time_out(server.run, server.attempt, OVER)).left_s
        server.forget_attempts()
        recorded = (await worker.time_out(server.run, server.attempt, OVER)).left_s
    assert resumed - since <= still <= time.time() - before
    assert recorded == pytest.approx(still, abs=0.01)
    calls = (await server.check(calls=2)).calls
    assert all(call.waits and call.status is CallStatus.OK for call in calls)


async def test_a_call_that_is_held_while_weights_change_is_not_charged(server: ModelServer, worker: Remote) -> None:
    await server.new_attempt()
    assert server.service.gateway is not None
    model = server.service.gateway.models["spark"]
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await started(server)
        assert (await worker.time_out(server.run, server.attempt, TimeoutRequest(9.0, 10.0))).left_s == 1.0
        model.hold()
        await asyncio.sleep(0.3)
        model.resume(1)
        assert (await worker.time_out(server.run, server.attempt, OVER)).left_s >= 0.3
        assert (await worker.time_out(server.run, server.attempt, TimeoutRequest(60.0, 10.0))).left_s == 0
        with pytest.raises(openai.PermissionDeniedError):
            await asking
    (call,) = (await server.check(calls=1)).calls
    (wait,) = call.waits
    assert wait.ended - wait.started >= 0.3


async def test_a_call_that_waits_for_a_restart_of_the_engine_is_not_charged(
    server: ModelServer, worker: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.new_attempt()
    server.say = lambda _: "Once" + END
    assert server.service.gateway is not None
    model, generate = server.service.gateway.models["spark"], server.engine.generate
    lost, restarted = asyncio.Event(), asyncio.Event()

    async def generate_later(request: EngineRequest) -> AsyncIterator[TokenChunk]:
        yield TokenChunk((), (), 0, restarting=True)
        lost.set()
        await restarted.wait()
        async for chunk in generate(request):
            yield chunk

    monkeypatch.setattr(server.engine, "generate", generate_later)
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await lost.wait()
        model.hold()
        model.resume(1)  # which does not end the other wait
        await asyncio.sleep(0.05)
        early = (await worker.time_out(server.run, server.attempt, OVER)).left_s
        await asyncio.sleep(0.05)
        assert (await worker.time_out(server.run, server.attempt, OVER)).left_s > early > 0
        restarted.set()
        assert (await asking).choices[0].message.content == "Once"
        server.forget_attempts()
        assert (await worker.time_out(server.run, server.attempt, OVER)).left_s > early
    await server.check(calls=1)


async def test_a_call_that_waits_for_the_store_is_not_charged(
    server: ModelServer, worker: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.new_attempt()
    server.say = lambda _: "Once" + END
    store = server.service.store
    record, full, tried = store.record_calls, True, asyncio.Event()

    async def record_if_there_is_room(*calls: Any) -> int:
        if full:
            tried.set()
            raise StoreUnavailable("the disk is full")
        return await record(*calls)

    monkeypatch.setattr(store, "record_calls", record_if_there_is_room)
    monkeypatch.setattr(recorder, "_STORE_WAIT_S", 10.0)
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await tried.wait()
        await asyncio.sleep(0.05)
        waited = (await worker.time_out(server.run, server.attempt, OVER)).left_s
        full = False
        assert (await asking).choices[0].message.content == "Once"
        assert (await worker.time_out(server.run, server.attempt, OVER)).left_s > waited > 0
    await server.check(calls=1)


async def test_only_a_worker_of_its_run_can_end_the_calls_of_an_attempt(server: ModelServer) -> None:
    await server.new_attempt("other")
    other = server.run
    await server.new_attempt()
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await started(server)
        key = server.service.keyring.create(KeyKind.WORKER, 60, run=other)[0]
        async with Remote(server.url, key) as stranger:
            for run in (other, server.run):
                with pytest.raises(RemoteError):
                    await stranger.time_out(run, server.attempt, OVER)
                with pytest.raises(RemoteError):
                    await stranger.finish(run, server.attempt, FinishRequest(Outcome(Ending.TIMEOUT)))
        assert not (await server.episode()).calls and not asking.done()
        asking.cancel()


async def test_a_call_that_nobody_waits_for_may_find_its_attempt_ended(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saving, ended = asyncio.Event(), asyncio.Event()

    async def refuse(*_: object) -> None:
        saving.set()
        await ended.wait()
        raise Conflict("the attempt has ended")

    await server.new_attempt()
    server.say = lambda _: "word"
    monkeypatch.setattr(server.service.store, "record_calls", refuse)
    async with client_of(server) as client:
        asking = asyncio.create_task(read_all(client, False))
        await saving.wait()
        asking.cancel()
        await asyncio.wait({asking})
    gateway = server.service.gateway
    assert gateway is not None
    await eventually(lambda: not any(attempt._in_flight for attempt in gateway._attempts.values()))
    ended.set()
    await asyncio.sleep(0.05)
    gc.collect()
    assert "never retrieved" not in caplog.text
