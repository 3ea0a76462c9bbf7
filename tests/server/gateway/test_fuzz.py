"""Requests mutated from valid ones: whatever a caller sends, the server neither fails nor hangs."""

import random
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from modelserving import END, ModelServer, model_server

from leyden.rendering.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"n": {"type": "number", "multipleOf": 2, "minimum": 0}}, "required": ["n"]}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief.", "name": "s"},
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "Seen."},
    ],
    "tools": [{"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "temperature": 1.0,
    "max_tokens": 5,
    "n": 1,
    "stop": ["x"],
    "response_format": {"type": "json_schema", "json_schema": {"name": "v", "schema": SCHEMA}},
    "stream": False,
    "stream_options": None,
    "logprobs": True,
    "top_logprobs": 2,
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be brief."}],
    "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"at": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [], "is_error": True}]},
    ],
    "tools": [{"name": "look", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "temperature": 1.0,
    "stop_sequences": ["x"],
    "stream": False,
}
SPANS: dict[str, Any] = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "k", "value": {"stringValue": "v"}}]},
            "scopeSpans": [
                {
                    "scope": {"name": "s"},
                    "spans": [
                        {
                            "traceId": "0" * 31 + "1",
                            "spanId": "0" * 15 + "1",
                            "name": "n",
                            "kind": 1,
                            "startTimeUnixNano": "1",
                            "endTimeUnixNano": "2",
                            "attributes": [{"key": "d", "value": {"doubleValue": 1.5}}],
                            "events": [{"name": "e", "timeUnixNano": "1"}],
                            "links": [{"traceId": "0" * 31 + "1", "spanId": "0" * 15 + "1"}],
                            "status": {"code": 1},
                        }
                    ],
                }
            ],
        }
    ]
}
REWARDS: Any = [{"kind": "step", "value": 0.5, "source": "agent"}]
VALUES: list[Any] = [None, True, 5, -1, 10**400, 0.5, 1e308, "", "x", "\x00", "\ud7ff", [], {}, [[]], {"": None}, [5]]


def mutate(document: Any, chance: random.Random) -> Any:
    """Change one value, or drop or repeat it."""
    document = deepcopy(document)
    spots: list[tuple[Any, Any]] = []
    todo = [document]
    while todo:
        part = todo.pop()
        for key in list(part) if isinstance(part, dict) else range(len(part)):
            spots.append((part, key))
            if isinstance(part[key], (dict, list)):
                todo.append(part[key])
    owner, key = chance.choice(spots)
    match chance.randrange(4):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, list):
            owner.append(deepcopy(owner[key]))
        case 2 if isinstance(owner, dict):
            name = chance.choice(("multipleOf", "$ref", "type", "pattern", "role", "allOf", "x"))
            owner[name] = chance.choice(VALUES)
        case _:
            owner[key] = chance.choice(VALUES)
    return document


async def send(server: ModelServer, count: int, seed: int) -> Counter[tuple[str, int]]:
    chance, answers = random.Random(seed), Counter[tuple[str, int]]()
    rewards = f"/api/runs/{server.run}/attempts/{server.attempt}/rewards"
    bodies = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/traces": SPANS, rewards: REWARDS}
    server.lines = ['{"n":2}' + END] * (10 * count)
    headers = {"authorization": f"Bearer {server.key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(60)) as session:
        for _ in range(count):
            path = chance.choice(list(bodies))
            body = mutate(bodies[path], chance)
            for _ in range(chance.randrange(2)):
                body = mutate(body, chance) if body else body
            async with session.post(server.url + path, json=body) as reply:
                text = await reply.text()
            assert reply.status < 500, (path, body, text)
            answers[path, reply.status] += 1
    return answers


async def test_inputs_that_failed_the_server_once_are_refused(tmp_path: Path) -> None:
    true = {"type": "json_schema", "json_schema": {"name": "v", "schema": {"type": "number", "multipleOf": True}}}
    double = deepcopy(SPANS)
    double["resourceSpans"][0]["resource"]["attributes"][0]["value"] = {"doubleValue": 10**400}
    called = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": 5}]
    async with model_server(tmp_path) as server, aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {await server.new_attempt()}"}
        for path, body in [
            ("/v1/chat/completions", {"model": "m", "messages": called}),
            ("/v1/chat/completions", {**CHAT, "response_format": true}),
            ("/v1/traces", double),
        ]:
            async with session.post(server.url + path, json=body, headers=headers) as reply:
                assert reply.status == 400, (path, await reply.text())


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
        await server.new_attempt()
        answers = await send(server, count, seed=17)
    reached = sum(times for (_, status), times in answers.items() if status == 200)
    assert reached > count // 5, answers
