"""The Anthropic Messages dialect, through the official client, unmodified."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import aiohttp
import anthropic
import msgspec
import pytest
from modelserving import END, ModelServer, call, model_server

from leyden.records import CallStatus, PromptOrigin, Purpose
from leyden.server.gateway.dialects.messages.request import read_request
from leyden.server.gateway.dialects.types import ToolChoice

ADD: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}
QUESTION: Any = {"role": "user", "content": "What is 2 + 3, and 4 + 5?"}
TWO_CALLS = "Let me add. " + call("add", '{"b":3,  "a": 2}') + call("add", '{"a": 4, "b": 5}') + END
ASK: Any = {"model": "any-name", "max_tokens": 500, "messages": [QUESTION]}


@pytest.fixture
async def client(server: ModelServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0) as made:
        yield made


def use_tools(answer: anthropic.types.Message) -> list[Any]:
    """What an agent sends back: the answer's own blocks, and the tools' results."""
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
        for block in answer.content
        if block.type == "tool_use"
    ]
    return [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


async def ask_raw(client: anthropic.AsyncAnthropic, **request: Any) -> list[Any]:
    return [event async for event in await client.messages.create(**{**ASK, **request}, stream=True)]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_with_parallel_tools_keeps_its_tokens(
    server: ModelServer, client: anthropic.AsyncAnthropic, streamed: bool
) -> None:
    async def ask(messages: list[Any]) -> anthropic.types.Message:
        request: Any = {**ASK, "system": "You can add.", "tools": [ADD], "messages": messages}
        if not streamed:
            return await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            return await stream.get_final_message()

    server.lines = [TWO_CALLS, "They are 5 and 9." + END, "You are welcome!" + END]
    messages = [QUESTION]
    first = await ask(messages)
    assert (first.model, first.type, first.role, first.stop_reason) == ("any-name", "message", "assistant", "tool_use")
    text, *calls = first.content
    assert text.type == "text"
    assert text.text.strip() == "Let me add."
    assert [block.input for block in calls if block.type == "tool_use"] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
    messages += use_tools(first)
    second = await ask(messages)
    assert second.stop_reason == "end_turn"
    # the rest as another framework would give it back: bare text, blocks with marks for a cache
    thanks = {"type": "text", "text": "Thanks", "cache_control": {"type": "ephemeral"}}
    messages += [{"role": "assistant", "content": "They are 5 and 9."}, {"role": "user", "content": [thanks]}]
    third = await ask(messages)
    episode = await server.check(calls=3)
    assert [c.prompt_origin for c in episode.calls] == ["fresh", "continued", "continued"]
    assert [message.id for message in (first, second, third)] == [f"msg_{c.id}" for c in episode.calls]
    assert server.tokenizer.decode(episode.calls[1].completion_ids) == "They are 5 and 9." + END
    last = episode.calls[2]
    usage = third.usage
    assert usage.output_tokens == len(last.completion_ids)
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(episode.prompt_ids(last))
    assert usage.cache_read_input_tokens == last.kept_ids


async def test_a_stream_has_the_events_of_the_real_service(
    server: ModelServer, client: anthropic.AsyncAnthropic
) -> None:
    server.lines = ["<think>\nHard.\n</think>\n\n" + TWO_CALLS]
    events = await ask_raw(client, tools=[ADD], thinking={"type": "adaptive"})
    names = [event.type for event in events]
    short = [name for at, name in enumerate(names) if name != "content_block_delta" or names[at - 1] != name]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert short == ["message_start", *block * 4, "message_delta", "message_stop"]
    started = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert started == ["thinking", "text", "tool_use", "tool_use"]
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2, 3]
    kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert kinds.count("input_json_delta") > 2  # the arguments of two calls, as they are sampled
    assert events[0].message.stop_reason is None
    assert events[-2].delta.stop_reason == "tool_use"
    headers = {"x-api-key": server.key, "content-type": "application/json"}
    server.lines = ["Hi" + END]
    asking = {"json": {**ASK, "stream": True}, "headers": headers}
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/v1/messages", **asking) as reply:
        lines = (await reply.text()).splitlines()
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event")][:2] == ["message_start", "ping"]


async def test_a_stream_says_what_the_whole_answer_says(server: ModelServer, client: anthropic.AsyncAnthropic) -> None:
    text = "Grüße 👋, and \n\n white  space."
    server.lines = [text + END, text + END, END, END]
    async with client.messages.stream(**ASK) as stream:
        assert "".join([piece async for piece in stream.text_stream]) == text
        streamed = await stream.get_final_message()
    whole = await client.messages.create(**ASK)
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason == "end_turn"
    empty = await client.messages.create(**ASK)
    assert empty.content == []
    assert [event.type for event in await ask_raw(client)] == ["message_start", "message_delta", "message_stop"]


def test_the_synchronous_client_works_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with model_server(tmp_path) as server:
            key = await server.new_attempt()
            server.lines = [TWO_CALLS, "5 and 9" + END, "Hello" + END]

            def talk() -> None:
                with anthropic.Anthropic(base_url=server.url, api_key=key) as client:
                    first = client.messages.create(**ASK, tools=[ADD])
                    request = {**ASK, "messages": [QUESTION, *use_tools(first)], "tools": [ADD]}
                    with client.messages.stream(**request) as stream:
                        assert stream.get_final_text() == "5 and 9"
                    events = client.messages.create(**ASK, stream=True)
                    assert [event.type for event in events][-1] == "message_stop"

            await asyncio.to_thread(talk)
            calls = (await server.check(calls=3)).calls
            assert [c.prompt_origin for c in calls] == [PromptOrigin.FRESH, PromptOrigin.CONTINUED, PromptOrigin.FRESH]

    asyncio.run(main())


async def test_the_clients_own_tool_loop_works(server: ModelServer, client: anthropic.AsyncAnthropic) -> None:
    @anthropic.beta_async_tool
    async def add(a: float, b: float) -> str:
        """Add two numbers."""
        return str(a + b)

    # The client would leave the conversation to the server; told that it cannot, it sends all of it.
    server.lines = [TWO_CALLS, call("add", '{"a": 1}') + END, "Done" + END]
    final = await client.beta.messages.tool_runner(**ASK, tools=[add]).until_done()
    assert [block.text for block in final.content if block.type == "text"] == ["Done"]
    episode = await server.check(calls=3)
    assert [c.prompt_origin for c in episode.calls] == ["fresh", "continued", "continued"]
    assert episode.messages(episode.calls[2])[-1]["is_error"]  # the second call lacks an argument


async def test_system_and_content_come_as_text_or_as_blocks(
    server: ModelServer, client: anthropic.AsyncAnthropic
) -> None:
    server.say = lambda _: "Yes" + END
    parts: Any = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind.", "cache_control": None}]
    for system in ("Be kind.", parts):
        await client.messages.create(**ASK, system=system)
    one, another = (await server.check(calls=2)).calls
    assert (await server.episode()).prompt_ids(one) == (await server.episode()).prompt_ids(another)
    assert one.messages[0] == {"role": "system", "content": "Be kind."}


def test_results_come_before_the_text_beside_them_and_answers_in_parts_are_one() -> None:
    conversation = [
        QUESTION,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": ""}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "So"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "And now?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "tool_result", "tool_use_id": "d"},
            ],
        },
    ]
    ask = read_request(
        msgspec.json.encode({**ASK, "messages": conversation, "metadata": {"user_id": "u"}, "new_field": 1})
    )
    assert ask.messages[1:] == (
        {
            "role": "assistant",
            "content": "So",
            "reasoning_content": "Hm",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "no", "is_error": True},
        {"role": "tool", "tool_call_id": "d", "content": ""},
        {"role": "user", "content": "And now?"},
    )
    assert ask.request == {
        "model": "any-name",
        "max_tokens": 500,
        "metadata": {"user_id": "u"},
        "new_field": 1,
    }


async def test_an_answer_says_why_it_ended(server: ModelServer, client: anthropic.AsyncAnthropic) -> None:
    server.lines = ["One STOPPED two" + END, "A long story about sparks" + END, "Again" + END]
    stopped = await client.messages.create(**ASK, stop_sequences=["STOP", "never"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert [block.text for block in stopped.content if block.type == "text"] == ["One "]
    async with client.messages.stream(**{**ASK, "max_tokens": 3}) as stream:
        cut = await stream.get_final_message()
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)
    go_on: Any = [QUESTION, {"role": "assistant", "content": cut.content}, {"role": "user", "content": "Go on"}]
    await client.messages.create(**{**ASK, "messages": go_on})
    episode = await server.check(calls=3)
    assert episode.calls[2].prompt_origin is PromptOrigin.CONTINUED
    assert episode.calls[2].parent == episode.calls[1].id


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking_is_shown_and_recognised(
    server: ModelServer, client: anthropic.AsyncAnthropic, streamed: bool
) -> None:
    server.lines = ["<think>\nTwo and three.\n</think>\n\nFive." + END, "Sure." + END]
    request: Any = {**ASK, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    if streamed:
        async with client.messages.stream(**request) as stream:
            answer = await stream.get_final_message()
    else:
        answer = await client.messages.create(**request)
    assert [block.to_dict(exclude_none=True) for block in answer.content] == [
        {"type": "thinking", "thinking": "Two and three.", "signature": ANY},
        {"type": "text", "text": "Five."},
    ]
    sure: Any = [QUESTION, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "Sure?"}]
    await client.messages.create(**{**request, "messages": sure})
    episode = await server.check(calls=2)
    assert episode.calls[1].prompt_origin is PromptOrigin.CONTINUED
    assert episode.calls[0].request["thinking"]["budget_tokens"] == 1024


async def test_evaluation_samples_as_the_caller_requests(server: ModelServer) -> None:
    key = await server.new_attempt("eval", Purpose.EVAL)
    server.lines = ["Hi" + END]
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=key) as client:
        await client.messages.create(**ASK, extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7})
    (made,) = (await server.check(calls=1)).calls
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.top_k) == (0.5, 0.9, 7)


async def test_counted_tokens_are_those_of_the_prompt(server: ModelServer, client: anthropic.AsyncAnthropic) -> None:
    server.lines = [TWO_CALLS, "5 and 9" + END, "Yes" + END]
    first = await client.messages.create(**ASK, system="You can add.", tools=[ADD])
    follow: Any = [QUESTION, *use_tools(first)]
    asks: list[Any] = [
        {"system": "You can add.", "tools": [ADD], "messages": follow},
        {"tools": [ADD], "tool_choice": {"type": "none"}, "messages": [QUESTION]},
    ]
    counted = [(await client.messages.count_tokens(model="m", **ask)).input_tokens for ask in asks]
    for ask in asks:
        await client.messages.create(model="m", max_tokens=9, **ask)
    episode = await server.check(calls=3)
    assert counted == [len(episode.prompt_ids(made)) for made in episode.calls[1:]]


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice()),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "add"}, ToolChoice("required", "add")),
    ],
)
def test_tools_are_offered_as_they_are_chosen(choice: Any, wanted: ToolChoice) -> None:
    ask = read_request(msgspec.json.encode({**ASK, "tools": [{**ADD, "cache_control": None}], "tool_choice": choice}))
    function = {"name": "add", "description": "Add two numbers.", "parameters": ADD["input_schema"]}
    assert ask.tools == ({"type": "function", "function": function},)
    assert ask.tool_choice == wanted


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "See"}, IMAGE]}]},
            "messages.0.content.1.type",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "It is"}]}, "messages"),
        (
            {
                "messages": [QUESTION, {"role": "assistant", "content": "It is"}],
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "messages",
        ),
        (
            {
                "messages": [
                    QUESTION,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
                ]
            },
            "messages.1",
        ),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages.0"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
        ({"system": [IMAGE]}, "system.0.type"),
        ({"tools": [ADD, {"type": "web_search_20250305", "name": "web_search"}]}, "tools.1.type"),
        ({"tools": [{"name": "add"}]}, "tools.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temperature": 2}}, "temperature"),
        ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers"),
        ({"extra_body": {"thread": {"type": "create"}}}, "thread"),
        ({"extra_body": {"compaction": {"type": "enabled"}}}, "compaction"),
    ],
)
async def test_what_cannot_be_served_is_a_400_that_names_the_parameter(
    client: anthropic.AsyncAnthropic, request_: dict[str, Any], param: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**{**ASK, **request_})
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("kind", ["web_search_20250305", "computer_20250124", "tool_search_tool_regex_20251119"])
async def test_a_tool_that_only_the_service_knows_is_refused_with_what_to_change(
    client: anthropic.AsyncAnthropic, kind: str
) -> None:
    tools: Any = [{"type": kind, "name": "it"}]
    with pytest.raises(anthropic.BadRequestError, match=f"{kind}.*remove it, or have the agent run .* input_schema"):
        await client.messages.create(**{**ASK, "tools": tools})


async def test_errors_are_of_the_classes_that_agents_catch(
    server: ModelServer, client: anthropic.AsyncAnthropic
) -> None:
    def told(refused: pytest.ExceptionInfo[anthropic.APIStatusError]) -> tuple[str, str]:
        body: Any = refused.value.body
        return body["error"]["type"], body["error"]["message"]

    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "1 " * 40_000}]})
    assert told(refused)[1].startswith("prompt is too long")
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.post("/v1/messages", body={"model": "m", "messages": [QUESTION]}, cast_to=object)
    assert "max_tokens" in told(refused)[1]
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await stranger.messages.create(**ASK)
        assert told(unknown)[0] == "authentication_error"
    key = await server.new_attempt("loop", max_calls=1)
    server.say = lambda _: "Again" + END
    async with anthropic.AsyncAnthropic(base_url=server.url, auth_token=key) as looping:
        await looping.messages.create(**ASK)
        with pytest.raises(anthropic.PermissionDeniedError, match="1 calls") as spent:
            await looping.messages.create(**ASK)
        assert told(spent)[0] == "permission_error"
    gateway = server.service.gateway
    assert gateway is not None
    server.service.gateway = None
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**ASK)
    assert told(missing)[0] == "not_found_error"


async def test_an_overloaded_model_says_when_to_retry(server: ModelServer, client: anthropic.AsyncAnthropic) -> None:
    assert server.service.gateway is not None
    scheduler = server.service.gateway.models["spark"].scheduler
    scheduler._max_waiting = 0
    scheduler.hold()
    with pytest.raises(anthropic.RateLimitError) as refused:
        await client.messages.create(**ASK)
    assert refused.value.response.headers["retry-after"] == "1"
    with pytest.raises(anthropic.RateLimitError):
        await ask_raw(client)


async def test_an_engine_that_dies_ends_the_stream_with_an_error(
    server: ModelServer, client: anthropic.AsyncAnthropic
) -> None:
    alive = server.tokenizer.encode("This is going well, isn't it")
    server.engine.script = lambda _: [*alive, -1]
    with pytest.raises(anthropic.APIStatusError, match="engine failed") as died:
        await ask_raw(client)
    body: Any = died.value.body
    assert body["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError, match="engine failed"):
        async with client.messages.stream(**ASK) as stream:
            await stream.get_final_message()
    with pytest.raises(anthropic.InternalServerError):
        await client.messages.create(**ASK)
    calls = (await server.check(calls=3)).calls
    assert {made.status for made in calls} == {CallStatus.FAILED}


async def test_roles_come_from_a_header_or_the_path(server: ModelServer, client: anthropic.AsyncAnthropic) -> None:
    server.say = lambda _: "Yes" + END
    await client.messages.create(**ASK, extra_headers={"x-leyden-role": "critic"}, extra_query={"beta": "true"})
    async with anthropic.AsyncAnthropic(base_url=f"{server.url}/role/writer", api_key=server.key) as writer:
        await writer.messages.create(**ASK)
        assert (await writer.messages.count_tokens(model="m", messages=[QUESTION])).input_tokens
    assert [c.role for c in (await server.check(calls=2)).calls] == ["critic", "writer"]


async def test_models_are_listed_and_found(server: ModelServer, client: anthropic.AsyncAnthropic) -> None:
    (listed,) = [model async for model in client.models.list(limit=5)]
    assert (listed.id, listed.type, listed.display_name) == ("spark", "model", "spark")
    assert (await client.models.retrieve("claude-any")).id == "claude-any"  # every name is the policy
    key = await server.new_attempt("routes", routes={"a": "spark", "b/c": "spark"})
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=key) as other:
        assert [model.id async for model in other.models.list(limit=1)] == ["spark", "a", "b/c"]  # in three pages
        assert [model.id for model in (await other.models.list(before_id="b/c", limit=1)).data] == ["a"]
        assert (await other.models.retrieve("b/c")).id == "b/c"
        with pytest.raises(anthropic.NotFoundError):
            await other.models.retrieve("claude-any")
