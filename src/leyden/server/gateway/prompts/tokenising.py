"""Where texts are tokenised: short ones at once, others in threads, and only few large ones at the same time."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

from leyden.server.gateway.prompts.prefix_index import PrefixIndex
from leyden.server.gateway.served_model import ServedModel

_SHORT_TEXT = 256
"""A text of this many bytes takes less than a millisecond; to hand it to a thread takes a tenth of one."""
_LARGE_TEXT = 256 << 10
"""Texts of this many bytes are tokenised one at a time for an attempt, and two at a time for a model."""

T = TypeVar("T")


async def in_thread(size: int, work: Callable[[], T]) -> T:
    """Run work on a text of this size, in a thread unless it is short. The tokenizer lets other threads run."""
    return await asyncio.to_thread(work) if size > _SHORT_TEXT else work()


async def within_memory(model: ServedModel, index: PrefixIndex, size: int, work: Callable[[], Awaitable[T]]) -> T:
    """Run work that tokenises a text of this size: large ones wait for each other.

    A thread cannot be cancelled, so the next one waits for it even if the client of the call has gone.
    """
    if size <= _LARGE_TEXT:
        return await work()
    async with AsyncExitStack() as bounds:
        await bounds.enter_async_context(index.large_prompts)
        await bounds.enter_async_context(model.large_prompts)
        running = asyncio.create_task(_release_after(bounds.pop_all(), work))
    return await asyncio.shield(running)


async def _release_after(bounds: AsyncExitStack, work: Callable[[], Awaitable[T]]) -> T:
    async with bounds:
        return await work()
