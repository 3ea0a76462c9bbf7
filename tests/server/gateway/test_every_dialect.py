"""What holds in every dialect: streamed arguments, turns that keep their tokens, aborted calls, retries."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from modelserving import END, ModelServer, call, eventually

from leyden.records import CallStatus, PromptOrigin

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
THOUGHT = "<think>\nTwo and three.\n</think>\n\n"
USER = {"role": "user", "content": "What is 2 + 3?"}
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses", "completions": "completions"}
WITH_TOOLS = ["chat", "messages", "responses"]


def body(dialect: str, *said: Any, **more: Any) -> dict[str, Any]:
    """A request of a dialect with `add` as a tool; a text where the dialect has no messages."""
    match dialect:
        case "chat":
            tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
            return {"model": "m", "messages": said, "tools": [tool], **more}
        case "messages":
            tool = {"name": "add", "input_schema": SCHEMA}
            return {"model": "m", "max_tokens": 9999, "messages": said, "tools": [tool], **more}
        case "responses":
            tool = {"type": "function", "name": "add", "parameters": SCHEMA}
            return {"model": "m", "input": said, "tools": [tool], **more}
    return {"model": "m", "prompt": "".join(str(one["content"]) for one in said), "max_tokens": 999, **more}


async def post(server: ModelServer, dialect: str, *said: Any) -> Any:
    headers = {"authorization": f"Bearer {server.key}"}
    url = f"{server.url}/v1/{PATHS[dialect]}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body(dialect, *said), headers=headers) as reply,
    ):
        answer = await reply.json()
        assert reply.status == 200, answer
        return answer


async def events(server: ModelServer, dialect: str, *said: Any) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a streamed answer, as they arrive; closing the iterator disconnects."""
    headers = {"authorization": f"Bearer {server.key}"}
    url, sent = f"{server.url}/v1/{PATHS[dialect]}", body(dialect, *said, stream=True)
    async with aiohttp.ClientSession() as session, session.post(url, json=sent, headers=headers) as reply:
        async for line in reply.content:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def given_back(dialect: str, answer: Any) -> tuple[list[Any], list[str]]:
    """The parts of an answer as a client of the dialect sends them back, and the ids of its tool calls."""
    if dialect == "chat":
        message = answer["choices"][0]["message"]
        return [message], [made["id"] for made in message.get("tool_calls") or ()]
    if dialect == "messages":
        blocks = answer["content"]
        return [{"role": "assistant", "content": blocks}], [one["id"] for one in blocks if one["type"] == "tool_use"]
    items = answer["output"]
    return items, [item["call_id"] for item in items if item["type"] == "function_call"]


def result(dialect: str, id: str, text: str = "5") -> Any:
    """The result of a tool call."""
    if dialect == "chat":
        return {"role": "tool", "tool_call_id": id, "content": text}
    if dialect == "messages":
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": id, "content": text}]}
    return {"type": "function_call_output", "call_id": id, "output": text}


@pytest.mark.parametrize("dialect", PATHS)
async def test_an_aborted_stream_is_abandoned_and_the_same_request_again_its_retry(
    server: ModelServer, dialect: str
) -> None:
    server.say = lambda _: "one two three four five six seven eight nine ten. " * 200 + END
    server.engine.delay_s = 0.05
    stream = events(server, dialect, USER)
    for _ in range(4):
        await anext(stream)
    await stream.aclose()
    await eventually(lambda: server.engine.cancelled == 1)
    server.say, server.engine.delay_s = (lambda _: "Five." + END), 0.0
    await post(server, dialect, USER)
    first, second = (await server.check(calls=2)).calls
    assert (first.status, second.status) == (CallStatus.ABANDONED, CallStatus.OK)
    assert second.retry_of == first.id
    assert first.untrainable == "abandoned" and first.completion_ids


@pytest.mark.parametrize("dialect", WITH_TOOLS)
async def test_arguments_are_streamed_while_they_are_sampled(server: ModelServer, dialect: str) -> None:
    given = {f"a{number}": number for number in range(100)}
    server.say = lambda _: call("add", json.dumps(given)) + END
    server.engine.delay_s = 0.001
    arguments, parts = "", 0
    async for event in events(server, dialect, USER):
        new = ""
        if dialect == "chat":
            calls = [made for choice in event["choices"] for made in choice["delta"].get("tool_calls") or ()]
            new = "".join(made["function"].get("arguments") or "" for made in calls)
        elif dialect == "messages" and event["type"] == "content_block_delta":
            new = event["delta"]["partial_json"]
        elif event.get("type") == "response.function_call_arguments.delta":
            new = event["delta"]
        arguments, parts = arguments + new, parts + bool(new)
    assert json.loads(arguments) == given
    assert parts > 10


@pytest.mark.parametrize("arguments", ['{"a": 2, "b" 3}', '{"a": 2, "b": "3}', '{"a": 2,, "b": 3}', '{"a" 2}'])
async def test_a_malformed_call_is_the_same_in_every_sdk_streamed_or_whole(server: ModelServer, arguments: str) -> None:
    server.say = lambda prompt: "I see." + END if "tool_response" in prompt else call("add", arguments) + END
    raw = arguments + "}" if arguments.count('"') % 2 else arguments  # a text that is open ends with the call
    key: Any = {"api_key": server.key, "max_retries": 0}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", **key) as client:
        asked = body("chat", USER)
        async with client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
        whole = await client.chat.completions.create(**asked)
        for answer in (final, whole):
            (made,) = answer.choices[0].message.tool_calls or ()
            assert (made.function.arguments, answer.choices[0].finish_reason) == (raw, "tool_calls")
        asked = body("responses", USER)
        async with client.responses.stream(**asked) as events_:
            response = await events_.get_final_response()
        for output in (response.output, (await client.responses.create(**asked)).output):
            assert [item.arguments for item in output if item.type == "function_call"] == [raw]
    async with anthropic.AsyncAnthropic(base_url=server.url, **key) as other:
        asked = body("messages", USER)
        async with other.messages.stream(**asked) as messages:
            said = await messages.get_final_message()
        for message in (said, await other.messages.create(**asked)):
            (block,) = message.content
            assert block.type == "tool_use" and message.stop_reason == "tool_use"
            assert block.input == ({"a": 2} if "2," in arguments else {}) | {"INVALID_JSON": raw}
        used = {"type": "tool_result", "tool_use_id": block.id, "content": "not JSON"}
        turn = {"role": "assistant", "content": message.to_dict()["content"]}
        await other.messages.create(**body("messages", USER, turn, {"role": "user", "content": [used]}))
    assert (await server.check(calls=7)).calls[-1].prompt_origin is PromptOrigin.CONTINUED


@pytest.mark.parametrize("dialect", WITH_TOOLS)
async def test_numbers_that_javascript_writes_differently_are_the_same(server: ModelServer, dialect: str) -> None:
    server.lines = [call("add", '{"b":3.0,   "a":2}') + END, "It is 5." + END]
    answer = await post(server, dialect, USER)
    parts, (id,) = given_back(dialect, answer)
    if dialect == "chat":
        parts[0]["tool_calls"][0]["function"]["arguments"] = '{"a":2,"b":3}'
    elif dialect == "messages":
        parts[0]["content"][0]["input"] = {"a": 2, "b": 3}
    else:
        parts[0]["arguments"] = '{"a":2,"b":3}'
    await post(server, dialect, USER, *parts, result(dialect, id))
    assert (await server.check(calls=2)).calls[1].prompt_origin is PromptOrigin.CONTINUED


@pytest.mark.parametrize("dialect", WITH_TOOLS)
@pytest.mark.parametrize("dropped", ["text", "reasoning"])
async def test_a_turn_of_which_text_or_reasoning_was_dropped_is_continued_and_the_record_says_so(
    server: ModelServer, dialect: str, dropped: str
) -> None:
    server.lines = [THOUGHT + "Let me add." + call("add", '{"a": 2, "b": 3}') + END, "It is 5." + END]
    parts, (id,) = given_back(dialect, await post(server, dialect, USER))
    if dialect == "chat":
        del parts[0]["content" if dropped == "text" else "reasoning_content"]
    elif dialect == "messages":
        kind = "text" if dropped == "text" else "thinking"
        parts[0]["content"] = [block for block in parts[0]["content"] if block["type"] != kind]
    else:
        parts = [item for item in parts if item["type"] != ("message" if dropped == "text" else "reasoning")]
    await post(server, dialect, USER, *parts, result(dialect, id))
    last = (await server.check(calls=2)).calls[1]
    assert last.prompt_origin is PromptOrigin.CONTINUED
    assert ("text beside a tool call" if dropped == "text" else "reasoning") in last.origin_reason


@pytest.mark.parametrize("dialect", WITH_TOOLS)
async def test_turns_before_an_edited_result_keep_their_tokens(server: ModelServer, dialect: str) -> None:
    odd = call("add", '{"b":3,   "a":2}')  # no template writes it so
    server.lines = [odd + END, odd + END, "It is 5." + END]
    said: list[Any] = [USER]
    ids: list[str] = []
    for text in ("a long result", "a second one"):
        parts, (id,) = given_back(dialect, await post(server, dialect, *said))
        ids.append(id)
        said += [*parts, result(dialect, id, text)]
    said[2] = result(dialect, ids[0], "cut")
    await post(server, dialect, *said)
    episode = await server.check(calls=3)
    first, last = episode.calls[0], episode.calls[2]
    assert last.prompt_origin is PromptOrigin.RERENDERED and last.parent == first.id
    assert last.kept_ids == len(episode.prompt_ids(first)) + len(first.completion_ids)
    assert server.tokenizer.decode(last.prompt_ids).count("cut") == 1


async def test_a_request_like_those_of_coding_agents_keeps_its_tokens(server: ModelServer) -> None:
    """Dozens of tools, 80 KB of instructions, marks for caching, beta headers and `?beta=true`."""
    server.engine.context_length = 1 << 20
    mark = {"type": "ephemeral"}
    tools: Any = [{"name": f"tool_{n}", "description": "Does it. " * 20, "input_schema": SCHEMA} for n in range(40)]
    tools[-1]["cache_control"] = mark
    system: Any = [
        {"type": "text", "text": "You are an agent."},
        {"type": "text", "text": "".join(f"Rule {n}: «read» notes.\n" for n in range(4000)), "cache_control": mark},
    ]
    assert len(system[1]["text"]) > 80_000
    server.lines = [call("tool_7", '{"a": 2.0, "b": 3}') + END, "It is 5." + END]
    options: Any = {"model": "m", "max_tokens": 999, "system": system, "tools": tools, "betas": ["a-2026", "b-2026"]}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Go.", "cache_control": mark}]}]
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
        answer = await client.beta.messages.create(messages=messages, **options)
        (use,) = answer.content
        assert use.type == "tool_use"
        del messages[0]["content"][0]["cache_control"]  # the mark moves to the newest message
        done = {"type": "tool_result", "tool_use_id": use.id, "content": "5", "cache_control": mark}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [done]}]
        await client.beta.messages.create(messages=messages, **options)
    assert (await server.check(calls=2)).calls[1].prompt_origin is PromptOrigin.CONTINUED


async def test_a_response_repeats_what_its_client_keeps_in_it(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["Hi" + END]
    kept: Any = {"prompt_cache_key": "thread-1", "metadata": {"a": "b"}, "truncation": "auto"}
    extra = {"client_metadata": {"session": "1"}}
    response = await client.responses.create(model="m", input="Hi", extra_body=extra, **kept)
    assert {name: getattr(response, name) for name in kept} == kept
    (made,) = (await server.check(calls=1)).calls
    assert made.request["client_metadata"] == {"session": "1"}
