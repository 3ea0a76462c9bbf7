"""A request is repeated until the server answers or refuses it, and an outage is reported once."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from leyden.api.client import RemoteError, RetryingRemote, RetryLimits

QUICK = RetryLimits(max_backoff_s=0.001)


@asynccontextmanager
async def answering(
    statuses: list[int], limits: RetryLimits = QUICK, is_gone: Callable[[], bool] = lambda: False
) -> AsyncIterator[tuple[RetryingRemote, list[str]]]:
    """A client of a server that answers with these statuses, the last of them for ever; and what the client reports."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response([], status=statuses.pop(0) if len(statuses) > 1 else statuses[0])

    app, reported = web.Application(), list[str]()
    app.router.add_get("/api/runs", answer)
    async with (
        TestServer(app) as server,
        RetryingRemote(str(server.make_url("")), "", reported.append, limits, is_gone) as client,
    ):
        yield client, reported


async def test_what_a_server_may_answer_later_is_repeated_and_a_refusal_raised() -> None:
    statuses = [429, 408, 500, 502, 503, 200, 409, 200]
    async with answering(statuses) as (client, reported):
        assert await client.list_runs() == []
        with pytest.raises(RemoteError):
            await client.list_runs()
    assert statuses == [200]
    assert [line.partition(" at http")[0] for line in reported] == ["no answer from the server", "the server"]
    assert "it answers 429" in reported[0] and "answers again" in reported[1]


async def test_a_server_that_fails_again_and_again_is_given_up() -> None:
    statuses = [503] * 100 + [500]
    async with answering(statuses, RetryLimits(max_backoff_s=0.0, max_errors=20)) as (client, _):
        with pytest.raises(RemoteError):
            await client.list_runs()
    assert statuses == [500]


async def test_few_failures_need_no_report_and_an_outage_that_others_saw_needs_no_second() -> None:
    async with answering([503, 503, 200, 503, 503, 503, 200], RetryLimits(max_backoff_s=0.0, silent_failures=2)) as (
        client,
        reported,
    ):
        await client.list_runs()
        assert reported == []
        client._is_down.set()
        await client.limited(30.0).list_runs()
        assert len(reported) == 1 and "answers again" in reported[0] and not client._is_down.is_set()


async def test_nobody_waits_for_a_server_that_is_gone() -> None:
    async with answering([503], is_gone=lambda: True) as (client, reported):
        with pytest.raises(RemoteError):
            await client.list_runs()
    assert reported == []
