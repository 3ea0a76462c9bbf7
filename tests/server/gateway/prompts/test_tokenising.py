"""How many large texts are tokenised at the same time."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from modelserving import model_server

from leyden.server.gateway.prompts.prefix_index import PrefixIndex
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
