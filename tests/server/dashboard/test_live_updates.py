"""What happens in a run reaches its page at once, and within a second while much happens."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from leyden.api.client import Remote, read_key
from leyden.api.wire import KeySpec, RunSpec
from leyden.records import Metric, RunSettings
from leyden.server.dashboard import store_polling, stream
from leyden.server.dashboard.run_stores import RunStores
from leyden.server.dashboard.store_polling import StorePolling
from leyden.server.options import ServeOptions
from leyden.server.serve import open_server
from leyden.store.store import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store(tmp_path / "leyden.db").start()
    await opened.create_run(RunSpec("r", RunSettings()))
    yield opened
    await opened.close()


def test_the_waits_between_an_event_and_the_page_are_less_than_a_second_together() -> None:
    script = files("leyden.server.dashboard").joinpath("static", "data.js").read_text()
    refresh = re.search(r"const REFRESH_MS = (\d+);", script)
    assert refresh is not None
    assert store_polling._INTERVAL_S + stream._INTERVAL_S + int(refresh[1]) / 1000 < 1


async def test_an_event_is_sent_without_waiting_and_those_that_follow_are_sent_together(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval of the stream only begins after a message: here it ends when the test says so."""
    passed, sleep = asyncio.Event(), asyncio.sleep

    async def interval(seconds: float) -> None:
        await (passed.wait() if seconds == stream._INTERVAL_S else sleep(seconds))

    monkeypatch.setattr(stream, "asyncio", SimpleNamespace(sleep=interval))
    stores = RunStores(store, None)
    service: Any = SimpleNamespace(store=store, store_polling=StorePolling(stores))
    async with aclosing(stream._changes(service, "r", 3600.0)) as changes:
        assert b"event: open" in await anext(changes)
        assert b'"run.created"' in await anext(changes)  # happened in the last two seconds
        following = asyncio.ensure_future(anext(changes))
        for step in (1, 2):
            await store.record_metrics("r", [Metric(step, "loss", 1.0)])
        assert not following.done()
        passed.set()
        assert b'{"r":{"metrics":2}}' in await following
    stores.close()


async def test_a_stream_ends_with_its_key(tmp_path: Path) -> None:
    async with open_server(ServeOptions(tmp_path)) as server:
        admin = read_key(tmp_path / "admin.key")
        async with Remote(server.running.url, admin) as remote, aiohttp.ClientSession() as session:
            key = (await remote.create_key(KeySpec("viewer", ttl_s=1.0))).key
            async with (
                asyncio.timeout(60),
                session.get(f"{server.running.url}/api/stream", headers={"authorization": f"Bearer {key}"}) as reply,
            ):
                assert b"event: open" in await reply.content.read()  # until it ends
