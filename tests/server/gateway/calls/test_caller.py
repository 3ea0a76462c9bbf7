"""Which rollout is calling, and in which role."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from modelserving import END, ModelServer, model_server

from leyden.api.wire import GroupSpec, LeaseRequest, RunSpec
from leyden.records import Span, Task
from leyden.server.control.keys import KeyKind

QUESTION: Any = {"role": "user", "content": "Who am I?"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ModelServer]:
    async with model_server(tmp_path) as running:
        running.say = lambda _: "Yes" + END
        yield running


async def test_rollouts_in_one_process_are_distinguished_by_their_context(server: ModelServer) -> None:
    store = server.service.store
    await store.create_run(RunSpec("r"))
    await store.enqueue("r", GroupSpec("g", Task("t", {}), 3))
    mine, other = [grant.attempt for grant in await store.lease(LeaseRequest("w", 2, run="r", pool="hall"))]
    (stranger,) = [grant.attempt for grant in await store.lease(LeaseRequest("w", run="r", pool="annex"))]
    key = server.service.keyring.create(KeyKind.POOL, 60, pool="hall")[0]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:

        async def call(**headers: str) -> None:
            await client.chat.completions.create(model="m", messages=[QUESTION], extra_headers=headers)

        await call(baggage=f"other=1, leyden.attempt={mine.id};p=2")
        await call(traceparent=f"00-{other.trace_id}-{'1' * 16}-01")
        await call(traceparent=f"00-{'9' * 32}-{'1' * 16}-01", baggage=f"leyden.attempt={other.id}")
        elsewhere = {"baggage": f"leyden.attempt={stranger.id}"}
        for headers in ({}, elsewhere, {"traceparent": f"00-{'9' * 32}-{'1' * 16}-01"}):
            with pytest.raises(openai.PermissionDeniedError):
                await call(**headers)
    server.run = "r"
    for server.attempt, calls in ((mine.id, 1), (other.id, 2), (stranger.id, 0)):
        await server.check(calls=calls)
    assert 'leyden_requests_refused_total{reason="no_context"} 2.0' in server.service.telemetry.render().decode()


async def test_a_rule_on_the_system_prompt_gives_the_role(server: ModelServer) -> None:
    key = await server.new_attempt(roles={"critic": "(?i)you criticise", "writer": "write"})
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        for system in ("You criticise what others write.", "You write.", "You wait."):
            messages: Any = [{"role": "system", "content": system}, QUESTION]
            await client.chat.completions.create(model="m", messages=messages)
        await client.chat.completions.create(
            model="m", messages=[{"role": "system", "content": "You write."}], extra_headers={"x-leyden-role": "poet"}
        )
    episode = await server.check(calls=4)
    assert [episode.role(call) for call in episode.calls] == ["critic", "writer", None, "poet"]


async def test_a_role_that_only_spans_know_is_found_through_them(server: ModelServer) -> None:
    key = await server.new_attempt()
    trace = "a" * 32
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        await client.chat.completions.create(
            model="m", messages=[QUESTION], extra_headers={"traceparent": f"00-{trace}-{'2' * 16}-01"}
        )
    agent = Span(trace, "1" * 16, None, "agent", "internal", 1, 9, attributes={"gen_ai.agent.name": "planner"})
    tool = Span(trace, "2" * 16, "1" * 16, "step", "internal", 2, 8)
    await server.service.store.record_spans(server.run, server.attempt, [tool, agent])
    episode = await server.check(calls=1)
    assert episode.role(episode.calls[0]) == "planner"
