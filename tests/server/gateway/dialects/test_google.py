"""Google's dialect, through the official client, unmodified."""

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from google import genai
from google.genai import errors, types
from modelserving import END, ModelServer, call

from leyden.records import PromptOrigin
from leyden.server.gateway.dialects.google.request import json_schema, read_request
from leyden.server.gateway.errors import GatewayError

ADD = types.FunctionDeclaration(
    name="add",
    description="Add two numbers.",
    parameters=types.Schema(
        type=types.Type.OBJECT,
        properties={"a": types.Schema(type=types.Type.NUMBER), "b": types.Schema(type=types.Type.NUMBER)},
    ),
)
CONFIG: dict[str, Any] = {"system_instruction": "You can add.", "tools": [types.Tool(function_declarations=[ADD])]}
QUESTION = "What is 2 + 3, and 4 + 5?"
TWO_CALLS = "Let me add. " + call("add", '{"b":3,  "a": 2}') + call("add", '{"a": 4, "b": 5}') + END
THOUGHT = "<think>\nHard: «ß».\n</think>\n\n"


@pytest.fixture
async def client(server: ModelServer) -> AsyncIterator[genai.client.AsyncClient]:
    async with genai.Client(api_key=server.key, http_options={"base_url": server.url}).aio as made:
        yield made


def results(answer: list[types.Part]) -> list[types.Part]:
    """What an agent makes of function calls: results without ids, as `from_function_response` writes them."""
    called = [part.function_call for part in answer if part.function_call is not None]
    return [
        types.Part.from_function_response(name=made.name or "", response={"result": sum((made.args or {}).values())})
        for made in called
    ]


async def send(chat: Any, message: Any, streamed: bool) -> tuple[list[types.Part], types.GenerateContentResponse]:
    """Send a message of a chat, which keeps its history itself; return all parts of the answer, and its end."""
    if not streamed:
        answer = await chat.send_message(message)
        return answer.candidates[0].content.parts, answer
    chunks = [chunk async for chunk in await chat.send_message_stream(message)]
    return [part for chunk in chunks for part in chunk.candidates[0].content.parts or ()], chunks[-1]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_with_parallel_tools_keeps_its_tokens(
    server: ModelServer, client: genai.client.AsyncClient, streamed: bool, thinking: bool
) -> None:
    thought = THOUGHT if thinking else ""
    if thinking:
        await server.new_attempt("thinking", history="exact")
        server.serve("qwen3", "qwen3")
        client = genai.Client(api_key=server.key, http_options={"base_url": server.url}).aio
    server.lines = [thought + line for line in (TWO_CALLS, "They are 5 and 9." + END, "You are welcome!" + END)]
    config = {**CONFIG, "thinking_config": {"include_thoughts": True}} if thinking else CONFIG
    chat = client.chats.create(model="any-name", config=config)
    parts, first = await send(chat, QUESTION, streamed)
    assert "".join(part.text or "" for part in parts if not part.thought).strip() == "Let me add."
    assert "".join(part.text or "" for part in parts if part.thought).strip() == ("Hard: «ß»." if thinking else "")
    calls = [part for part in parts if part.function_call]
    assert [part.function_call.args for part in calls if part.function_call] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
    assert [part.thought_signature is not None for part in calls] == [thinking, False]
    assert first.candidates
    assert (first.candidates[0].finish_reason, first.model_version) == (types.FinishReason.STOP, "any-name")
    parts, _ = await send(chat, results(parts), streamed)
    assert "".join(part.text or "" for part in parts if not part.thought) == "They are 5 and 9."
    _, third = await send(chat, "Thanks", streamed)
    episode = await server.check(calls=3)
    origins = [PromptOrigin.FRESH, PromptOrigin.CONTINUED, PromptOrigin.CONTINUED]
    assert [made.prompt_origin for made in episode.calls] == origins
    last, usage = episode.calls[2], third.usage_metadata
    assert third.response_id == last.id
    assert usage is not None
    assert usage.prompt_token_count == len(episode.prompt_ids(last))
    assert usage.cached_content_token_count == last.kept_ids
    assert (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0) == len(last.completion_ids)
    assert bool(usage.thoughts_token_count) is thinking


async def test_thoughts_are_hidden_unless_asked_for_and_can_be_switched_off(
    server: ModelServer, client: genai.client.AsyncClient
) -> None:
    server.serve("qwen3", "qwen3")
    server.lines = [THOUGHT + "Yes." + END, "No." + END]
    shown = await client.models.generate_content(model="m", contents="?")
    assert shown.candidates
    assert [part.text for part in shown.candidates[0].content.parts] == ["Yes."]
    off: Any = {"thinking_config": {"thinking_budget": 0}}
    await client.models.generate_content(model="m", contents="?", config=off)
    first, second = (await server.episode()).calls
    episode = await server.episode()
    assert "<think>" not in server.tokenizer.decode(episode.prompt_ids(first))
    assert "<think>" in server.tokenizer.decode(episode.prompt_ids(second))  # closed already


async def test_parameters_reach_the_model_and_answers_follow_a_schema(
    server: ModelServer, client: genai.client.AsyncClient
) -> None:
    server.lines = ['{"a": 5}' + END, "One" + END, "Two" + END]
    schema = types.Schema(type=types.Type.OBJECT, properties={"a": types.Schema(type=types.Type.INTEGER)})
    sampling: Any = {"temperature": 0.5, "top_k": 7, "max_output_tokens": 50, "stop_sequences": ["stop"], "seed": 3}
    asked = {**sampling, "response_mime_type": "application/json", "response_schema": schema}
    answer = await client.models.generate_content(model="m", contents="?", config=asked)
    assert answer.parsed == {"a": 5}
    request = server.engine.requests[0]
    wanted = (await server.episode()).calls[0].request["generationConfig"]
    assert (wanted["temperature"], wanted["topK"], request.sampling.max_tokens) == (0.5, 7, 50)
    assert request.grammar is not None
    several: Any = {"candidate_count": 2, "response_logprobs": True, "logprobs": 0}
    two = await client.models.generate_content(model="m", contents="?", config=several)
    assert two.candidates
    assert sorted(one.content.parts[0].text for one in two.candidates) == ["One", "Two"]
    assert all(one.logprobs_result and one.logprobs_result.chosen_candidates for one in two.candidates)


async def test_models_tokens_and_errors_have_googles_form(
    server: ModelServer, client: genai.client.AsyncClient
) -> None:
    assert [model.name async for model in await client.models.list()] == ["models/spark"]
    assert (await client.models.get(model="spark")).display_name == "spark"
    counted = await client.models.count_tokens(model="spark", contents="Hello")
    server.lines = ["Hi" + END]
    answer = await client.models.generate_content(model="spark", contents="Hello")
    assert answer.usage_metadata is not None
    assert counted.total_tokens == answer.usage_metadata.prompt_token_count
    picture = types.Part.from_bytes(data=b"png", mime_type="image/png")
    search: Any = {"tools": [types.Tool(google_search=types.GoogleSearch())]}
    for contents, config in ((["What is it?", picture], None), ("?", search), ("?", {"temperature": 9.0})):
        with pytest.raises(errors.ClientError) as refused:
            await client.models.generate_content(model="spark", contents=contents, config=config)
        assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
    with pytest.raises(errors.ClientError, match="models/spark:batchEmbedContents is not served") as refused:
        await client.models.embed_content(model="spark", contents="Hello")
    assert (refused.value.code, refused.value.status) == (404, "NOT_FOUND")
    stranger = genai.Client(api_key="wrong", http_options={"base_url": server.url}).aio
    with pytest.raises(errors.ClientError) as refused:
        await stranger.models.generate_content(model="spark", contents="Hello")
    assert (refused.value.code, refused.value.status) == (401, "UNAUTHENTICATED")
    server.lines = ["Hi"]
    server.engine.script = lambda _: [*server.tokenizer.encode("I am"), -1]  # the engine fails in the middle
    with pytest.raises(errors.ServerError):
        async for _ in await client.models.generate_content_stream(model="spark", contents="Hello"):
            pass


async def test_a_key_in_the_url_is_accepted_on_googles_paths_only_and_not_logged(
    server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"contents": [{"parts": [{"text": "Hi"}]}], "generation_config": {"max_output_tokens": 9}}
    server.lines = ["Hi" + END] * 3
    statuses = {}
    with caplog.at_level(logging.DEBUG):
        async with aiohttp.ClientSession(server.url) as session:
            for path in (
                "/v1beta/models/m:generateContent",
                "/v1/models/m:generateContent",
                "/role/judge/v1beta/models/m:streamGenerateContent",
                "/v1/embeddings",
                "/v1/chat/completions",
            ):
                asked = {"key": server.key, "alt": "sse"}
                async with session.post(path, params=asked, json=body) as reply:
                    statuses[path] = reply.status, await reply.text()
    assert [status for status, _ in statuses.values()] == [200, 200, 200, 401, 401]
    assert server.key not in caplog.text
    recorded = [made.request for made in (await server.episode()).calls]
    assert recorded == [{"model": "m", "generation_config": {"max_output_tokens": 9}}] * 3


def test_parts_that_are_not_text_are_left_out_beside_a_tools_result() -> None:
    picture = {"inlineData": {"mimeType": "image/png", "data": ""}}
    result = {"name": "look", "response": {"error": "blurred"}, "parts": [picture]}
    contents = [
        {"parts": [{"text": "Look"}]},
        {"role": "model", "parts": [{"functionCall": {"name": "look"}}, {"thoughtSignature": "cw=="}]},
        {"role": "user", "parts": [{"functionResponse": result}, picture]},
    ]
    request, _ = read_request(json.dumps({"contents": contents}).encode(), "m")
    left_out = "[inline_data left out: this model takes text only]"
    assert request.messages[2] == {
        "role": "tool",
        "tool_call_id": "call_0",
        "content": f"blurred{left_out}{left_out}",
        "is_error": True,
        "left_out": ["inline_data", "inline_data"],
    }


def test_a_result_that_is_written_twice_is_read_once() -> None:
    """As gemini-cli writes it when it resumes a session; two results of one call are still a mistake."""
    made = {"functionCall": {"id": "a", "name": "look"}}
    result = {"functionResponse": {"id": "a", "name": "look", "response": {"output": "seen"}}}
    other = {"functionResponse": {"id": "a", "name": "look", "response": {"output": "not seen"}}}

    def read(*results: Any) -> Any:
        contents = [{"parts": [{"text": "Look"}]}, {"role": "model", "parts": [made]}, {"parts": results}]
        return read_request(json.dumps({"contents": contents}).encode(), "m")[0].messages

    assert read(result, result) == read(result)
    assert len(read(result)) == 3
    with pytest.raises(GatewayError):
        read(result, other)


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        ({}, ("auto", None)),
        ({"mode": "NONE"}, ("none", None)),
        ({"mode": "ANY"}, ("required", None)),
        ({"mode": "ANY", "allowedFunctionNames": ["add"]}, ("required", {"add"})),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["add"]}, ("auto", {"add"})),
    ],
)
def test_a_tool_choice_is_read(config: Any, choice: Any) -> None:
    tools = [{"functionDeclarations": [{"name": "add"}, {"name": "sub"}]}]
    body = {"contents": [{}], "tools": tools, "toolConfig": {"functionCallingConfig": config}}
    request, _ = read_request(json.dumps(body).encode(), "m")
    assert (request.tool_choice.mode, request.tool_choice.allowed) == choice


def test_schemas_become_json_schema() -> None:
    given = {
        "type": "OBJECT",
        "property_ordering": ["type"],
        "properties": {
            "type": {"type": "STRING", "nullable": True},
            "of": {"any_of": [{"type": "ARRAY", "minItems": "2"}]},
        },
    }
    nullable = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    made = {"type": "object", "properties": {"type": nullable, "of": {"anyOf": [{"type": "array", "minItems": 2}]}}}
    assert json_schema(given) == made
