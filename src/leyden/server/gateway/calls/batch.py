"""Merges the answers to several prompts of one request. They are generated at the same time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from msgspec.structs import replace

from leyden.server.gateway.dialects.types import AnswerEvent


async def merge_answers(
    answers: Sequence[AsyncGenerator[AnswerEvent, None]], n: int
) -> AsyncGenerator[AnswerEvent, None]:
    """Yield the events of all answers, each of which has `n` choices; the choices are numbered on.

    The `AnswerStarted` of all come first, so that a prompt that cannot be answered is an error before any text.
    """
    queue: asyncio.Queue[AnswerEvent | asyncio.Task[None]] = asyncio.Queue()

    async def forward(number: int) -> None:
        async for event in answers[number]:
            queue.put_nowait(replace(event, choice=event.choice + number * n))

    tasks: list[asyncio.Task[None]] = []
    try:
        started = [replace(await anext(answer), choice=number * n) for number, answer in enumerate(answers)]
        for event in started:
            yield event
        tasks += [asyncio.create_task(forward(number)) for number in range(len(answers))]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if isinstance(item, asyncio.Task):
                unfinished -= 1
                item.result()
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for answer in answers:
            await answer.aclose()
