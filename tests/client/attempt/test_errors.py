"""Whose failure an exception is, with real clients against a server that fails in every way it can."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from modelserving import model_server

from leyden.client.attempt.errors import describe, is_loop_error, outcome_of_error
from leyden.outcomes import Ending
from leyden.user_code.bridge import call_in_thread

MESSAGES: Any = [{"role": "user", "content": "Say number 1"}]


async def test_failures_of_the_engine_are_distinguished_from_those_of_the_agent(tmp_path: Path) -> None:
    async with model_server(tmp_path) as server:
        key = await server.new_attempt(max_calls=4)
        server.engine.script = lambda _: (5, 6, 7, 8, 9, -1)
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        claude = anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0)

        async def plain() -> None:
            await client.chat.completions.create(model="m", messages=MESSAGES)

        async def streamed() -> None:
            async for _ in await client.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                pass

        async def claude_plain() -> None:
            await claude.messages.create(model="m", max_tokens=10, messages=MESSAGES)

        async def claude_streamed() -> None:
            async for _ in await claude.messages.create(model="m", max_tokens=10, messages=MESSAGES, stream=True):
                pass

        async def wrapped() -> None:
            try:
                await streamed()
            except openai.APIError as error:
                raise RuntimeError("the tool failed") from error

        for agent in (plain, wrapped, claude_plain, claude_streamed):
            outcome = outcome_of_error(await _raised(agent), server.url)
            assert outcome.ending is Ending.ENGINE_ERROR and "the engine failed" in outcome.message, agent
        spent = outcome_of_error(await _raised(plain), server.url)
        assert spent.ending is Ending.AGENT_ERROR and "max_calls" in spent.message
        assert outcome_of_error(await _raised(plain), "http://elsewhere:1").ending is Ending.AGENT_ERROR
        await client.close()
        await claude.close()


async def test_an_agent_may_use_another_name_of_the_loopback_address(tmp_path: Path) -> None:
    async with model_server(tmp_path) as server:
        key = await server.new_attempt()
        server.engine.script = lambda _: (-1,)
        url = server.url.replace("127.0.0.1", "localhost")
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            error = await _raised(lambda: client.chat.completions.create(model="m", messages=MESSAGES))
    assert outcome_of_error(error, server.url).ending is Ending.ENGINE_ERROR


async def test_no_connection_to_the_server_is_not_the_agents_fault() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            error = await _raised(lambda: client.chat.completions.create(model="m", messages=MESSAGES))
    assert outcome_of_error(error, url).ending is Ending.ENGINE_ERROR
    assert outcome_of_error(error, "http://127.0.0.1:1").ending is Ending.AGENT_ERROR  # some tool of its own, say


async def test_a_timeout_of_the_agents_client_is_an_agent_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=0.2) as client:
            error = await _raised(lambda: client.chat.completions.create(model="m", messages=MESSAGES))
    assert outcome_of_error(error, url).ending is Ending.AGENT_ERROR


def test_a_description_begins_with_the_error_and_names_the_agents_lines() -> None:
    def parse(text: str) -> int:
        return int(text)

    with pytest.raises(ValueError) as caught:
        parse("x" * 10_000)
    lines = describe(caught.value).splitlines()
    assert lines[0].startswith("ValueError: invalid literal for int()")
    assert lines[1].startswith("  in parse, ") and lines[1].endswith(": return int(text)")
    assert len(describe(caught.value)) <= 4000


async def test_a_description_has_no_lines_of_what_calls_the_code_of_users() -> None:
    def divide() -> float:
        return 1 / 0

    error = await _raised(lambda: call_in_thread(divide))
    _, *frames = describe(error).splitlines()
    assert [frame.split(",")[0].strip() for frame in frames] == ["in divide", "in _raised"]


async def _raised(agent: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:
        await agent()
    return caught.value


def test_an_error_with_a_url_that_cannot_be_read_is_the_agents() -> None:
    error = RuntimeError("no such page")
    error.request = SimpleNamespace(url="http://[no-address:99999999")
    assert outcome_of_error(error, "http://127.0.0.1:8484").ending is Ending.AGENT_ERROR


def test_an_object_of_another_event_loop_is_recognised_anywhere_in_the_chain() -> None:
    event = asyncio.Event()

    async def wait() -> None:
        async with asyncio.timeout(0):
            await event.wait()

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    with pytest.raises(RuntimeError, match="bound to a different event loop") as other_loop:
        asyncio.run(wait())
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError, match="Event loop is closed") as closed:
        loop.call_soon(print)
    request = httpx.Request("POST", "http://127.0.0.1:1/v1/chat/completions")
    for error in (other_loop.value, closed.value):
        wrapped = openai.APIConnectionError(request=request)
        wrapped.__cause__ = httpx.ReadError("")
        wrapped.__cause__.__context__ = error
        assert is_loop_error(error) and is_loop_error(wrapped) and is_loop_error(ExceptionGroup("", [wrapped]))
    assert not any(map(is_loop_error, (RuntimeError("no"), ValueError("Event loop is closed"), TimeoutError())))
