"""Requests mutated from valid ones: whatever a caller sends, the server neither fails nor hangs."""

import json
import random
import sys
import time
from collections import Counter
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from modelserving import END, ModelServer, model_server

from leyden.rendering.tokenizer import Tokenizer
from leyden.server.control.keys import KeyKind
from leyden.server.control.routes import ROUTES
from leyden.server.gateway.dialects.base import Dialect, ModelAccess, RouteRequest
from leyden.server.gateway.dialects.registry import DIALECTS
from leyden.server.gateway.errors import GatewayError
from leyden.server.http.limits import LIMITS

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import fuzz  # its folder is on the path only now

FORMAT = {"type": "json_schema", "json_schema": {"name": "v", "schema": fuzz.SCHEMA}}
CHAT: dict[str, Any] = {**fuzz.CHAT, "tool_choice": "auto", "response_format": FORMAT}
RESPONSES = {"model": "m", "input": "?"}
REWARDS = "/api/runs/{run}/attempts/{attempt}/rewards"


async def send(server: ModelServer, count: int, seed: int) -> Counter[tuple[str, int]]:
    """Send mutated requests; return the number of each path's statuses. Each attempt sends fewer than its key may."""
    chance, answers = random.Random(seed), Counter[tuple[str, int]]()
    bodies = {"/v1/chat/completions": CHAT} | {
        path: fuzz.body_of(path) for path in ("/v1/messages", "/v1/traces", REWARDS)
    }
    server.lines = ['{"n":2}' + END] * (10 * count)
    burst = int(LIMITS[KeyKind.ATTEMPT].per_second)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        for number in range(count):
            if number % burst == 0:
                await server.new_attempt(f"g{number}", agent_rewards=True)
            path = chance.choice(list(bodies))
            body = fuzz.mutate(bodies[path], chance)
            for _ in range(chance.randrange(2)):
                body = fuzz.mutate(body, chance) if body else body
            url = server.url + path.format(run=server.run, attempt=server.attempt)
            async with session.post(url, json=body, headers={"authorization": f"Bearer {server.key}"}) as reply:
                text = await reply.text()
            assert reply.status < 500, (path, body, text)
            answers[path, reply.status] += 1
    return answers


async def test_inputs_that_failed_the_server_once_are_refused(tmp_path: Path) -> None:
    schema = {"type": "number", "multipleOf": True}
    true = {"type": "json_schema", "json_schema": {"name": "v", "schema": schema, "strict": True}}
    double = deepcopy(fuzz.body_of("/v1/traces"))
    double["resourceSpans"][0]["resource"]["attributes"][0]["value"] = {"doubleValue": 10**400}
    called = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": 5}]
    async with model_server(tmp_path) as server, aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {await server.new_attempt()}"}
        for path, body in [
            ("/v1/chat/completions", {"model": "m", "messages": called}),
            ("/v1/chat/completions", {**CHAT, "response_format": true}),
            ("/v1/traces", double),
            ("/v1/responses", {**RESPONSES, "tools": [{"type": "namespace", "name": "n", "tools": [5]}]}),
            ("/v1/responses", {**RESPONSES, "input": [{"type": "reasoning", "summary": 5}]}),
        ]:
            async with session.post(server.url + path, json=body, headers=headers) as reply:
                assert reply.status == 400, (path, await reply.text())


class NothingStored:
    """What a dialect asks the gateway for, where nothing is stored."""

    async def stored_answer(self, call: str) -> None:
        return None


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
async def test_every_dialect_reads_or_refuses_mutated_requests(dialect: Dialect) -> None:
    chance, access = random.Random(17), cast(ModelAccess, NothingStored())
    for _ in range(1500):
        body = fuzz.body_of(f"/v1{dialect.path}")
        for _ in range(chance.choice((1, 1, 2, 3))):
            body = fuzz.mutate(body, chance) if isinstance(body, dict | list) else body
        with suppress(GatewayError):
            await dialect.read(RouteRequest({"model": "m"}, {"alt": "sse"}, json.dumps(body).encode()), access)


async def test_many_calls_of_many_tools_are_read_in_linear_time() -> None:
    tools = [{"type": "custom", "name": f"tool-{number}"} for number in range(20_000)]
    item = {"type": "custom_tool_call", "call_id": "c", "name": "none", "input": ""}
    responses = next(dialect for dialect in DIALECTS if dialect.path == "/responses")
    body = json.dumps({"model": "m", "tools": tools, "input": [item] * 20_000}).encode()
    started = time.thread_time()
    await responses.read(RouteRequest({}, {}, body), cast(ModelAccess, NothingStored()))
    assert time.thread_time() - started < 5


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenised: list[int] = []
    encode = Tokenizer.text_ids

    def text_ids(self: Tokenizer, text: str) -> list[int]:
        tokenised.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "text_ids", text_ids)
    async with model_server(tmp_path) as server, aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {await server.new_attempt()}"}
        long = "word " * (1 << 20)
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": "' + long + '"}'}}
        begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": long}]
        for path, messages in (
            ("chat/completions", [{"role": "user", "content": long}]),
            ("chat/completions", [{"role": "assistant", "content": long}, {"role": "user", "content": "?"}]),
            (
                "chat/completions",
                [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "?"}],
            ),
            ("chat/completions", begun),
            ("messages/count_tokens", begun),
        ):
            body = {"model": "m", "messages": messages}
            async with session.post(f"{server.url}/v1/{path}", json=body, headers=headers) as reply:
                assert reply.status == 400 and "bytes, and the model takes" in await reply.text()
    assert max(tokenised, default=0) < 1 << 20


@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=pytest.mark.slow)])
async def test_mutated_requests_never_fail_the_server(tmp_path: Path, count: int) -> None:
    async with model_server(tmp_path) as server:
        answers = await send(server, count, seed=17)
    assert not {status for _, status in answers} & {401, 403, 429}, answers
    routes = {route.path: route for route in ROUTES if route.method == "POST"}
    reached = sum(times for (path, status), times in answers.items() if fuzz.reached_handler(routes[path], status))
    assert reached >= count // 2, answers
