"""Calls and their attempt: seeds of their own, one budget, and an engine that is told when it is over."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from modelserving import END, ModelServer, eventually, model_server
from sqlalchemy.exc import OperationalError

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest
from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome
from leyden.records import Purpose
from leyden.server.control.keys import KeyKind
from leyden.server.gateway.calls.call_pacer import CallPacer
from leyden.server.gateway.prompts.prefix_index import PrefixIndex
from leyden.store.read import queries

ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "Heads or tails?"}]}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ModelServer]:
    async with model_server(tmp_path) as running:
        running.say = lambda _: "Heads" + END
        yield running


def client_of(server: ModelServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0)


async def end_attempt(server: ModelServer) -> None:
    await server.service.store.finish(server.run, server.attempt, FinishRequest(Outcome(Ending.AGENT_ERROR)))


async def test_runs_of_the_same_seed_sample_the_same_tokens_under_any_name(tmp_path: Path) -> None:
    seeds = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        async with model_server(tmp_path / name) as server:
            server.say = lambda _: "Heads" + END
            await server.new_attempt(name, group="same")
            async with client_of(server) as client:
                for _ in range(2):
                    await client.chat.completions.create(**ASK)
            seeds.append([request.sampling.seed for request in server.engine.requests])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2


async def test_concurrent_calls_are_sampled_with_different_seeds(server: ModelServer) -> None:
    await server.new_attempt()
    async with client_of(server) as client:
        await asyncio.gather(*(client.chat.completions.create(**ASK, n=n) for n in (1, 2, 1, 2)))
    assert len({request.sampling.seed for request in server.engine.requests}) == 6


async def test_calls_begin_in_turn(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, turn = 0, CallPacer.turn

    async def counted(self: CallPacer) -> None:
        nonlocal turns
        turns += 1
        await turn(self)

    monkeypatch.setattr(CallPacer, "turn", counted)
    await server.new_attempt()
    async with client_of(server) as client:
        await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(3)))
    assert turns == 3


async def test_calls_made_at_the_same_time_share_a_budget(server: ModelServer) -> None:
    await server.new_attempt(max_calls=3)
    async with client_of(server) as client:
        got = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(8)), return_exceptions=True)
        assert sum(isinstance(answer, openai.PermissionDeniedError) for answer in got) == 5
        with pytest.raises(openai.PermissionDeniedError):
            await client.chat.completions.create(**ASK)
    await server.check(calls=3)


@pytest.mark.parametrize(
    ("purpose", "step", "calls", "tokens"),
    [(Purpose.TRAIN, 4, 1, 2), (Purpose.TRAIN, 5, 2, 3), (Purpose.EVAL, 1, 2, 5), (Purpose.DEV, None, 2, 3)],
)
async def test_limits_are_those_of_the_step_and_an_evaluation_has_the_last(
    server: ModelServer, purpose: Purpose, step: int | None, calls: int, tokens: int
) -> None:
    limits = {"max_calls": {1: 1, 5: 2}, "completion_tokens": {3: 2, 5: 3}}
    await server.new_attempt(purpose=purpose, step=step, **limits)
    async with client_of(server) as client:
        for _ in range(calls):
            await client.chat.completions.create(**{**ASK, "max_tokens": 5})
            server.forget_attempts()  # as a restart does
        with pytest.raises(openai.PermissionDeniedError, match=f"of its {calls} calls"):
            await client.chat.completions.create(**ASK)
    assert {request.max_tokens for request in server.engine.requests} == {tokens}


async def test_a_restarted_server_reads_an_attempt_once_and_answers_others_meanwhile(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.new_attempt()
    async with client_of(server) as client:
        await client.chat.completions.create(**ASK)
        server.forget_attempts()
        build, threads = PrefixIndex.from_episode, list[threading.Thread]()

        def noted(episode: Episode) -> PrefixIndex:
            threads.append(threading.current_thread())
            return build(episode)

        monkeypatch.setattr(PrefixIndex, "from_episode", noted)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(client.chat.completions.create(**ASK))
    (thread,) = threads
    assert thread is not threading.main_thread()
    await server.check(calls=4)


async def test_the_session_of_an_attempt_ends_with_it(server: ModelServer) -> None:
    await server.new_attempt()
    await end_attempt(server)
    assert server.engine.ended_sessions == [server.attempt]


async def test_the_session_is_ended_again_when_a_call_ends_after_its_attempt(server: ModelServer) -> None:
    await server.new_attempt()
    server.engine.delay_s = 0.2
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(**ASK))
        await eventually(lambda: len(server.engine.requests) == 1)
        await end_attempt(server)
        with pytest.raises(openai.PermissionDeniedError):
            await asking
    assert server.engine.ended_sessions == [server.attempt] * 2


async def test_a_call_whose_attempt_ends_while_it_begins_is_refused_and_leaves_nothing(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.new_attempt()
    store, gateway = server.service.store, server.service.gateway
    assert gateway is not None
    read = store.read

    async def read_slowly(query: Any, *args: Any) -> Any:
        found = await read(query, *args)
        if query is queries.get_run:
            await end_attempt(server)
        return found

    monkeypatch.setattr(store, "read", read_slowly)
    async with client_of(server) as client:
        with pytest.raises(openai.PermissionDeniedError, match="has ended"):
            await client.chat.completions.create(**ASK)
    assert gateway._attempts == {}
    assert server.engine.requests == []


async def test_each_choice_waits_for_its_own_slot(server: ModelServer) -> None:
    assert server.service.gateway is not None
    scheduler = server.service.gateway.models["spark"].scheduler
    scheduler._free, scheduler._max_wait_s = 1, 0.3
    await server.new_attempt()
    async with client_of(server) as client:
        answer = await client.chat.completions.create(**ASK, n=3)
        assert [choice.message.content for choice in answer.choices] == ["Heads"] * 3
        server.engine.delay_s = 1.0  # the second has to wait for longer than anybody may
        with pytest.raises(openai.InternalServerError, match="no slot of the model was free"):
            await client.chat.completions.create(**ASK, n=2)
    assert scheduler._free == 1
    await server.check(calls=3)


async def test_the_server_adds_up_where_the_time_of_a_run_s_calls_goes(server: ModelServer) -> None:
    await server.new_attempt()
    assert server.service.gateway is not None
    model = server.service.gateway.models["spark"]
    model.hold()
    async with client_of(server) as client:
        calls = [asyncio.create_task(client.chat.completions.create(**ASK, n=n)) for n in (1, 2)]
        await eventually(lambda: model.scheduler.waiting == 3)
        held = time.perf_counter()
        await asyncio.sleep(0.05)
        held = time.perf_counter() - held
        model.resume(1)
        await asyncio.gather(*calls)
    key, _ = server.service.keyring.create(KeyKind.ADMIN, 3600)
    async with Remote(server.url, key) as remote:
        times = await remote.get_call_times(server.run)
    assert times.queued_s >= 2 * held
    parts = times.queued_s + times.prompt_s + times.decoding_s + times.store_s
    assert min(times.prompt_s, times.decoding_s, times.store_s) > 0 and parts < times.total_s


async def test_reading_the_times_of_unknown_runs_takes_no_memory(server: ModelServer) -> None:
    key, _ = server.service.keyring.create(KeyKind.ADMIN, 3600)
    async with Remote(server.url, key) as remote:
        assert (await remote.get_call_times("unknown")).total_s == 0
    assert server.service.gateway is not None and "unknown" not in server.service.gateway.times


async def test_the_size_of_the_store_is_read_outside_the_event_loop(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []

    def size() -> int:
        measured.append(threading.get_ident())
        if len(measured) > 1:
            raise OperationalError("SELECT", {}, Exception("the database is down"))
        return 4096

    monkeypatch.setattr(server.service.store.database, "size", size)
    key, _ = server.service.keyring.create(KeyKind.ADMIN, 3600)
    headers = {"authorization": f"Bearer {key}"}
    for _ in range(2):  # metrics are answered while the database is down, with the size that was measured last
        async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{server.url}/metrics") as reply:
            assert reply.status == 200 and "leyden_store_bytes 4096.0" in await reply.text()
    assert len(measured) == 2 and threading.get_ident() not in measured


@pytest.mark.parametrize("chunk", [1, 64])
async def test_what_follows_a_stop_string_is_not_part_of_the_answer(server: ModelServer, chunk: int) -> None:
    await server.new_attempt()
    server.engine.chunk_tokens = chunk
    server.say = lambda _: "One. Two. Three. Four. Five. Six. Seven."
    async with client_of(server) as client:
        answer = await client.chat.completions.create(**ASK, stop=["Th"])
    (call,) = (await server.check(calls=1)).calls
    said = server.tokenizer.decode(call.completion_ids)
    assert answer.choices[0].message.content == call.response["content"] == "One. Two. "
    assert answer.usage is not None and answer.usage.completion_tokens == len(call.completion_ids)
    assert said.startswith("One. Two. Th") and "Four" not in said
    assert call.context_tail == (said != "One. Two. Th")
    assert len(call.chosen) == len(call.completion_ids) - call.context_tail


async def test_an_attempt_that_ended_is_freed_at_once(server: ModelServer) -> None:
    """Tokens of long prompts are what takes memory: they do not wait for a garbage collection."""
    await server.new_attempt()
    gateway = server.service.gateway
    assert gateway is not None
    collecting = gc.isenabled()
    gc.disable()
    try:
        async with client_of(server) as client:
            await client.chat.completions.create(**ASK, n=2)
            async for _ in await client.chat.completions.create(**ASK, stream=True):
                pass
        index = weakref.ref(gateway._attempts[server.attempt].index)
        await end_attempt(server)
        server.engine.requests.clear()
        await eventually(lambda: index() is None)
    finally:
        if collecting:
            gc.enable()
