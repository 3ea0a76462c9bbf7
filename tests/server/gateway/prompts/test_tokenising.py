"""How many large texts are tokenised at the same time, and that none holds up other calls."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from modelserving import END, model_server

from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.dialects.responses.items import seal_reasoning
from leyden.server.gateway.prompts.history import History
from leyden.server.gateway.prompts.prefix_index import PrefixIndex
from leyden.server.gateway.prompts.prompt import longest_text
from leyden.server.gateway.prompts.tokenising import in_thread, within_memory

LARGE = 1 << 20


class Tokenising:
    """Work in a thread that takes until it may end."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.began.set()
        self.may_end.wait()


async def test_a_large_text_waits_for_one_whose_client_has_gone(tmp_path: Path) -> None:
    async with model_server(tmp_path) as server:
        assert server.service.gateway is not None
        model, attempt = server.service.gateway.models["spark"], PrefixIndex()

        def start(work: Callable[[], None], index: PrefixIndex) -> asyncio.Task[None]:
            return asyncio.create_task(within_memory(model, index, LARGE, partial(in_thread, LARGE, work)))

        abandoned, waiting, of_another, third = Tokenising(), Tokenising(), Tokenising(), Tokenising()
        try:
            gone = start(abandoned, attempt)
            await asyncio.to_thread(abandoned.began.wait)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            same_attempt, other_attempt = start(waiting, attempt), start(of_another, PrefixIndex())
            await asyncio.to_thread(of_another.began.wait)
            same_model = start(third, PrefixIndex())
            await asyncio.sleep(0.05)
            assert not waiting.began.is_set()  # one at a time for an attempt
            assert not third.began.is_set()  # two at a time for a model
            abandoned.may_end.set()
            await asyncio.to_thread(third.began.wait)
        finally:
            for work in (abandoned, waiting, of_another, third):
                work.may_end.set()
        await asyncio.gather(same_attempt, other_attempt, same_model)


async def test_a_large_text_whose_client_goes_while_it_waits_is_not_tokenised(tmp_path: Path) -> None:
    async with model_server(tmp_path) as server:
        assert server.service.gateway is not None
        model, attempt = server.service.gateway.models["spark"], PrefixIndex()
        first, second = Tokenising(), Tokenising()
        running = asyncio.create_task(within_memory(model, attempt, LARGE, partial(in_thread, LARGE, first)))
        await asyncio.to_thread(first.began.wait)
        waiting = asyncio.create_task(within_memory(model, attempt, LARGE, partial(in_thread, LARGE, second)))
        await asyncio.sleep(0)
        waiting.cancel()
        first.may_end.set()
        await running
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not second.began.is_set()
        assert not attempt.large_prompts.locked()


async def test_two_large_texts_at_a_time_and_one_of_each_attempt() -> None:
    model: Any = SimpleNamespace(large_prompts=asyncio.Semaphore(2))
    attempts: dict[str, Any] = {name: SimpleNamespace(large_prompts=asyncio.Lock()) for name in ("greedy", "b", "c")}
    begun, may_end = list[str](), asyncio.Event()

    async def work(name: str) -> None:
        begun.append(name)
        await may_end.wait()

    names = ["greedy"] * 4 + ["b", "c"]
    waiting = [asyncio.create_task(within_memory(model, attempts[name], LARGE, partial(work, name))) for name in names]
    for _ in range(20):
        await asyncio.sleep(0)
    assert begun == ["greedy", "b"]
    may_end.set()
    await asyncio.gather(*waiting)
    assert sorted(begun) == sorted(names)


async def test_reasoning_that_a_template_may_drop_is_tokenised_beside_other_calls_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(tokenizer: Tokenizer, text: str) -> list[int]:
        if len(text) > LARGE // 8:
            threads.append(threading.current_thread())
        return text_ids(tokenizer, text)

    text_ids = Tokenizer.text_ids
    monkeypatch.setattr(Tokenizer, "text_ids", noted)
    async with model_server(tmp_path) as server:
        await server.new_attempt()
        server.say = lambda _: "So." + END
        url, headers = f"{server.url}/v1/responses", {"authorization": f"Bearer {server.key}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for size, why in ((LARGE // 4, "tokens"), (5 * LARGE, "leave out")):
                thought = {"type": "reasoning", "encrypted_content": seal_reasoning("x" * (size - 1))}
                asked: dict[str, Any] = {"model": "spark", "input": [thought, {"role": "user", "content": "Well?"}]}
                async with session.post(url, json=asked) as reply:
                    assert reply.status == 400 and why in await reply.text()
    assert threads and threading.main_thread() not in threads


def with_reasoning(size: int) -> dict[str, Any]:
    return {"role": "assistant", "content": "So.", "reasoning_content": "x" * size}


def with_arguments(size: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": "x" * size}
    return {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("answer", "why"), [(with_reasoning, "bytes of reasoning"), (with_arguments, "the tool calls have")]
)
async def test_more_than_an_agent_can_have_collected_is_refused_before_it_is_read(
    answer: Callable[[int], dict[str, Any]], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(History, "of", lambda *_: pytest.fail("the history is read"))
    async with model_server(tmp_path) as server:
        await server.new_attempt()
        assert server.service.gateway is not None
        far_too_much = 8 * longest_text(server.service.gateway.models["spark"]) + 1
        url, headers = f"{server.url}/v1/chat/completions", {"authorization": f"Bearer {server.key}"}
        messages = [{"role": "user", "content": "Why?"}, answer(far_too_much), {"role": "user", "content": "And?"}]
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, json={"model": "spark", "messages": messages}) as reply,
        ):
            assert reply.status == 400 and why in await reply.text()


def test_arguments_are_compared_by_meaning_up_to_as_many_values_as_a_body_may_have() -> None:
    def essence(values: int, number: str) -> bytes:
        function = {"name": "add", "arguments": f'{{"n": [{", ".join([number] * values)}]}}'}
        answer: dict[str, Any] = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
        return History.of([answer], (), "m").essential_digests[-1]

    assert essence(1000, "2.0") == essence(1000, "2")
    assert essence(300_000, "2.0") != essence(300_000, "2")
