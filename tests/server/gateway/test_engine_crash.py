"""Whose failure an attempt's end is: an engine, a queue or a store that failed its latest call, or the agent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import openai
import pytest
from modelserving import END, ModelServer, eventually, model_server

from leyden.api.client import Remote, RemoteError
from leyden.api.wire import FinishReply, FinishRequest
from leyden.engine.protocol import EngineError, EngineLost, EngineRequest, TokenChunk
from leyden.outcomes import Ending, Outcome
from leyden.records import CallStatus, State
from leyden.server.control.keys import KeyKind
from leyden.store.errors import NotStorable
from leyden.store.store import Store

MESSAGES: Any = [{"role": "user", "content": "Hi"}]
LOST = EngineLost("the connection to vLLM is lost")


class Failing:
    """What the model says: the given errors first, then a word."""

    def __init__(self, *errors: EngineError) -> None:
        self._errors = list(errors)

    def __call__(self, prompt: str) -> str:
        if self._errors:
            raise self._errors.pop(0)
        return f"Well{END}"


@asynccontextmanager
async def attempt(home: Path, **settings: Any) -> AsyncIterator[tuple[ModelServer, openai.AsyncOpenAI]]:
    """An attempt of a rollout that has one, and the client of its agent."""
    async with model_server(home) as server:
        key = await server.new_attempt(**{"max_attempts": 1, **settings})
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            yield server, client


async def ask(client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(model="m", messages=MESSAGES)


async def finish(server: ModelServer, ending: Ending = Ending.AGENT_ERROR) -> FinishReply:
    """Report the end as a worker does."""
    async with Remote(server.url, server.service.keyring.create(KeyKind.WORKER, 60)[0]) as worker:
        return await worker.finish(server.run, server.attempt, FinishRequest(Outcome(ending, "exit status 1")))


@pytest.mark.parametrize("reported", [Ending.ENGINE_ERROR, Ending.AGENT_ERROR])
@pytest.mark.parametrize(("error", "state"), [(LOST, State.QUEUED), (EngineError("no memory"), State.FINISHED)])
async def test_only_an_attempt_that_a_crash_of_the_engine_failed_is_not_charged(
    tmp_path: Path, error: EngineError, state: State, reported: Ending
) -> None:
    async with attempt(tmp_path) as (server, client):
        server.say = Failing(error)
        with pytest.raises(openai.InternalServerError, match=str(error)):
            await ask(client)
        ended = await finish(server, reported)
        assert (ended.outcome.ending, ended.rollout.state) == (Ending.ENGINE_ERROR, state)
        assert "exit status 1" in ended.outcome.message
        assert reported is Ending.ENGINE_ERROR or f"the engine failed: {error}" in ended.outcome.message


async def test_a_rollout_that_crashes_the_engine_each_time_has_no_attempt_left_in_the_end(tmp_path: Path) -> None:
    async with attempt(tmp_path) as (server, client):
        server.say = Failing(LOST, LOST)
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        assert (await finish(server)).rollout.state is State.QUEUED
        key = await server.next_attempt()
        with pytest.raises(openai.InternalServerError):
            await ask(client.with_options(api_key=key))
        ended = await finish(server)
        assert (ended.outcome.ending, ended.rollout.state) == (Ending.ENGINE_ERROR, State.FINISHED)


async def test_a_request_that_an_sdk_repeats_crashes_the_engine_twice_and_in_a_retry_once(tmp_path: Path) -> None:
    async with attempt(tmp_path, max_attempts=2) as (server, client):
        server.say = Failing(*[LOST] * 9)
        repeating = client.with_options(max_retries=5)
        with pytest.raises(openai.PermissionDeniedError, match="makes no further calls"):
            await ask(repeating)
        assert len(server.engine.requests) == 2
        ended = await finish(server)
        assert (ended.outcome.ending, ended.rollout.state) == (Ending.ENGINE_ERROR, State.QUEUED)
        key = await server.next_attempt()
        with pytest.raises(openai.PermissionDeniedError, match="makes no further calls"):
            await ask(repeating.with_options(api_key=key))
        assert len(server.engine.requests) == 3
        assert (await finish(server)).rollout.state is State.FINISHED  # two crashes in one attempt were charged


@pytest.mark.parametrize("reported", [Ending.SUCCEEDED, Ending.TIMEOUT, Ending.AGENT_ERROR])
async def test_an_agent_whose_calls_are_refused_after_a_crash_did_not_end_by_itself(
    tmp_path: Path, reported: Ending
) -> None:
    async with attempt(tmp_path, max_attempts=2) as (server, client):
        server.say = Failing(LOST, LOST)
        with pytest.raises(openai.PermissionDeniedError, match="makes no further calls"):
            await ask(client.with_options(max_retries=2))
        ended = await finish(server, reported)
        assert (ended.outcome.ending, ended.rollout.state) == (Ending.ENGINE_ERROR, State.QUEUED)


async def test_a_call_that_lost_the_engine_late_does_not_hide_the_next_crash(tmp_path: Path) -> None:
    async with attempt(tmp_path) as (server, client):
        server.say = Failing(LOST, LOST)
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        calls = server.service.gateway._attempts[server.attempt]
        calls.lose_engine("the engine failed: the connection is lost", started=0.0)  # it was in flight, too
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        assert calls.engine_crashes == 2


async def test_calls_that_were_in_flight_together_lost_the_engine_once(tmp_path: Path) -> None:
    async with attempt(tmp_path) as (server, client):
        server.say = Failing(LOST, LOST)
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=MESSAGES, n=2)
        await ask(client)
        await finish(server, Ending.SUCCEEDED)


async def test_an_agent_that_fails_after_a_later_answer_failed_by_itself(tmp_path: Path) -> None:
    async with attempt(tmp_path) as (server, client):
        server.say = Failing(LOST)
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        await ask(client)
        assert (await finish(server)).outcome == Outcome(Ending.AGENT_ERROR, "exit status 1")


async def test_an_answer_to_a_call_that_had_begun_before_says_nothing_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attempt(tmp_path) as (server, client):
        go_on, generate = asyncio.Event(), server.engine.generate

        async def generate_later(request: EngineRequest) -> AsyncIterator[TokenChunk]:
            await go_on.wait()
            async for chunk in generate(request):
                yield chunk

        server.say = Failing(LOST)
        monkeypatch.setattr(server.engine, "generate", generate_later)
        earlier = asyncio.create_task(ask(client))
        model = server.service.gateway.models["spark"]
        await eventually(lambda: model.scheduler.running == 1)
        monkeypatch.setattr(server.engine, "generate", generate)
        with pytest.raises(openai.InternalServerError):
            await ask(client)
        go_on.set()
        await earlier
        assert (await finish(server)).outcome.ending is Ending.ENGINE_ERROR


async def test_a_queue_that_is_full_is_not_the_agents_fault(tmp_path: Path) -> None:
    async with attempt(tmp_path) as (server, client):
        scheduler = server.service.gateway.models["spark"].scheduler
        scheduler._max_waiting = 0
        scheduler.hold()
        with pytest.raises(openai.RateLimitError):
            await ask(client)
        assert (await finish(server)).outcome.ending is Ending.ENGINE_ERROR


async def test_an_attempt_that_ends_while_its_failed_call_is_recorded_is_not_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, go_on, record = asyncio.Event(), asyncio.Event(), Store.record_calls

    async def record_later(self: Store, *call: Any) -> int:
        recording.set()
        await go_on.wait()
        return await record(self, *call)

    monkeypatch.setattr(Store, "record_calls", record_later)
    async with attempt(tmp_path) as (server, client):
        server.say = Failing(LOST)
        asking = asyncio.create_task(ask(client))
        await recording.wait()
        ended = await finish(server)
        assert (ended.outcome.ending, ended.rollout.state) == (Ending.ENGINE_ERROR, State.QUEUED)
        go_on.set()
        with pytest.raises(openai.APIStatusError):
            await asking


async def test_an_agent_cannot_make_its_own_failure_an_engine_error(tmp_path: Path) -> None:
    async with attempt(tmp_path, max_calls=1) as (server, client):
        server.say, server.engine.delay_s = Failing(), 60.0
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=MESSAGES, temperature=-1)
        async with await client.chat.completions.create(model="m", messages=MESSAGES, stream=True) as stream:
            await anext(aiter(stream))  # and it disconnects
        await eventually(lambda: server.service.gateway.recorder.counts.total() == 1)
        assert [call.status for call in (await server.episode()).calls] == [CallStatus.ABANDONED]
        with pytest.raises(openai.PermissionDeniedError, match="max_calls"):
            await ask(client)
        async with Remote(server.url, server.key) as agent:
            with pytest.raises(RemoteError) as refused:
                await agent.finish(server.run, server.attempt, FinishRequest(Outcome(Ending.ENGINE_ERROR, "503")))
        assert refused.value.status == 403
        assert (await finish(server)).outcome == Outcome(Ending.AGENT_ERROR, "exit status 1")


async def test_a_call_that_cannot_be_stored_is_the_agents_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Store, *call: Any) -> NoReturn:
        raise NotStorable("this cannot be stored as JSON: it is nested too deep")

    monkeypatch.setattr(Store, "record_calls", refuse)
    async with attempt(tmp_path) as (server, client):
        server.say = Failing()
        with pytest.raises(openai.BadRequestError, match="nested too deep"):
            await ask(client)
        assert (await finish(server)).outcome.ending is Ending.AGENT_ERROR
