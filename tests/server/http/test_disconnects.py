"""The handling of a request ends when its client disconnects, and for no other reason."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from leyden.server.http.app import CancelOnDisconnect


class Client:
    """Disconnects when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def handle(client: Client, started: asyncio.Event, ended: list[str]) -> str:
    with CancelOnDisconnect(client.receive):
        try:
            started.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
    await asyncio.sleep(0)  # the task goes on: the cancellation ended with the context
    return "went on"


async def test_a_disconnect_cancels_the_block_and_nothing_after_it() -> None:
    client, started, ended = Client(), asyncio.Event(), list[str]()
    handling = asyncio.create_task(handle(client, started, ended))
    await started.wait()
    client.gone.set()
    assert await handling == "went on" and ended == ["cancelled"]
    assert handling.cancelling() == 0


@pytest.mark.parametrize("disconnects", [False, True])
async def test_a_cancellation_of_the_task_itself_is_kept(disconnects: bool) -> None:
    client, started, ended = Client(), asyncio.Event(), list[str]()
    handling = asyncio.create_task(handle(client, started, ended))
    await started.wait()
    if disconnects:
        client.gone.set()
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await handling
    assert ended == ["cancelled"]


async def test_a_block_that_ends_first_is_not_cancelled_later() -> None:
    client = Client()
    with CancelOnDisconnect(client.receive):
        await asyncio.sleep(0)
        client.gone.set()
    for _ in range(5):
        await asyncio.sleep(0)
