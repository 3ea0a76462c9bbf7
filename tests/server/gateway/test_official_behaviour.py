"""What the official SDKs see as in the APIs' own services: tools that are shown, pictures, reasoning, new turns."""

import json
from typing import Any

import anthropic
import openai
import pytest
from modelserving import END, ModelServer, call

from leyden.records import PromptOrigin, Purpose

USER: Any = {"role": "user", "content": "What is 2 + 3?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
FUNCTIONS = [{"name": name, "parameters": SCHEMA} for name in ("add", "sub")]
CHAT: Any = {"model": "m", "messages": [USER], "tools": [{"type": "function", "function": one} for one in FUNCTIONS]}
RESPONSES: Any = {"model": "m", "input": [USER], "tools": [{"type": "function", **one} for one in FUNCTIONS]}
MESSAGES: Any = {
    "model": "m",
    "max_tokens": 999,
    "messages": [USER],
    "tools": [{"name": one["name"], "input_schema": SCHEMA} for one in FUNCTIONS],
}
ADD = call("add", '{"a": 2, "b": 3}')
PICTURE = "data:image/png;base64,aGk="


class Clients:
    """The official clients of one server; they do not retry."""

    def __init__(self, server: ModelServer) -> None:
        self.openai = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0)

    async def ask(self, dialect: str, **more: Any) -> Any:
        """Send a request; return the answer as a message, a list of blocks or a list of items."""
        if dialect == "chat":
            return (await self.openai.chat.completions.create(**(CHAT | more))).choices[0].message
        if dialect == "messages":
            return (await self.anthropic.messages.create(**(MESSAGES | more))).content
        return (await self.openai.responses.create(**(RESPONSES | more))).output


@pytest.fixture
async def clients(server: ModelServer) -> Any:
    made = Clients(server)
    yield made
    await made.openai.close()
    await made.anthropic.close()


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.EVAL])
@pytest.mark.parametrize(
    ("dialect", "choice"),
    [
        ("chat", "none"),
        ("messages", {"type": "none"}),
        ("responses", "none"),
        (
            "chat",
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "sub"}}]},
            },
        ),
        ("responses", {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}]}),
    ],
)
async def test_tools_that_must_not_be_called_stay_in_the_prompt_and_a_call_of_one_is_text(
    server: ModelServer, dialect: str, choice: Any, purpose: Purpose
) -> None:
    await server.new_attempt("other", purpose)
    clients = Clients(server)
    server.lines = ["Let me see." + ADD + END, ADD + END]
    said = await clients.ask(dialect, tool_choice=choice)
    if dialect == "chat":
        assert said.tool_calls is None and "<tool_call>" in said.content
    else:
        (part,) = said
        assert "<tool_call>" in (part.text if dialect == "messages" else part.content[0].text)
    free = await clients.ask(dialect)
    first, second = (await server.check(calls=2)).calls
    assert second.prompt_ids == () and second.kept_ids == first.kept_ids + len(first.prompt_ids)  # the same prompt
    assert free.tool_calls if dialect == "chat" else free[0].type in ("tool_use", "function_call")
    grammar, none = (request.grammar for request in server.engine.requests)
    assert none is None and (grammar is None) == (purpose is Purpose.TRAIN)  # this engine does not say what it allowed
    assert grammar is None or ('\\"add' not in grammar and ('\\"sub' in grammar) == ("sub" in json.dumps(choice)))


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
async def test_a_picture_in_a_tools_result_is_left_out_and_the_session_goes_on(
    server: ModelServer, clients: Clients, dialect: str
) -> None:
    server.lines = [ADD + END, "I see nothing." + END, "Bye." + END]
    made = await clients.ask(dialect)
    if dialect == "chat":
        id, turn = made.tool_calls[0].id, [made.to_dict()]
        picture: Any = {"type": "image_url", "image_url": {"url": PICTURE}}
        result = {"role": "tool", "tool_call_id": id, "content": [{"type": "text", "text": "Here: "}, picture]}
    elif dialect == "messages":
        id, turn = made[0].id, [{"role": "assistant", "content": [block.to_dict() for block in made]}]
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
        used = {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": "Here: "}, picture]}
        result = {"role": "user", "content": [used]}
    else:
        id, turn = made[0].call_id, [item.to_dict() for item in made]
        picture = {"type": "input_image", "image_url": PICTURE, "detail": "auto"}
        output = [{"type": "input_text", "text": "Here: "}, picture]
        result = {"type": "function_call_output", "call_id": id, "output": output}
    said = [USER, *turn, result]
    field = "input" if dialect == "responses" else "messages"
    await clients.ask(dialect, **{field: said})
    recorded = (await server.check(calls=2)).calls[1]
    assert recorded.prompt_origin is PromptOrigin.CONTINUED
    assert recorded.messages[0]["content"] == "Here: [image left out: this model takes text only]"
    assert recorded.messages[0]["left_out"] == [picture["type"]]
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="this model takes text"):
        await clients.ask(dialect, **{field: [{"role": "user", "content": [picture]}]})


@pytest.mark.parametrize(
    ("dialect", "asked", "open"),
    [
        ("chat", {}, True),
        ("chat", {"reasoning_effort": "low"}, True),
        ("chat", {"reasoning_effort": "none"}, False),
        ("chat", {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False),
        ("responses", {"reasoning": {"effort": "none"}}, False),
        ("responses", {}, True),
        ("messages", {"thinking": {"type": "disabled"}}, False),
        ("messages", {"thinking": {"type": "adaptive"}}, True),
        ("messages", {}, True),
    ],
)
async def test_reasoning_can_be_switched_off(
    server: ModelServer, clients: Clients, dialect: str, asked: Any, open: bool
) -> None:
    server.serve("Qwen/Qwen3-0.6B", "qwen3")
    server.lines = [("<think>\nTwo and three.\n</think>\n\n" if open else "") + "Five." + END, "Bye." + END]
    said = await clients.ask(dialect, **asked)
    episode = await server.check(calls=1)
    prompt = server.tokenizer.decode(episode.prompt_ids(episode.calls[0]))
    assert prompt.endswith("<|im_start|>assistant\n" if open else "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    if dialect == "messages":  # it shows thinking only if it is asked to
        assert [block.type for block in said] == ["thinking", "text"] if open and asked else ["text"]
        turn = {"role": "assistant", "content": [block.to_dict() for block in said]}
        more = [USER, turn, {"role": "user", "content": "Bye"}]
        await clients.ask(dialect, messages=more, **asked)
        assert not open or (await server.check(calls=2)).calls[1].origin_reason.endswith("reasoning of earlier turns")
        assert open or (await server.check(calls=2)).calls[1].prompt_origin is PromptOrigin.CONTINUED


async def test_the_run_can_switch_reasoning_off(server: ModelServer) -> None:
    server.serve("Qwen/Qwen3-0.6B", "qwen3")
    await server.new_attempt("quiet", reasoning=False)
    server.lines = ["Five." + END]
    await Clients(server).ask("chat", reasoning_effort="high")
    assert server.tokenizer.decode(server.engine.requests[-1].prompt_ids).endswith("</think>\n\n")


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_the_model_begins_a_new_turn_after_an_answer(server: ModelServer, clients: Clients, dialect: str) -> None:
    server.lines = ["Five." + END, "Five it is." + END]
    await clients.ask(dialect)
    said = [USER, {"role": "assistant", "content": "Five."}]
    again = await clients.ask(dialect, **{"input" if dialect == "responses" else "messages": said})
    assert (again.content if dialect == "chat" else again[0].content[0].text) == "Five it is."
    episode = await server.check(calls=2)
    prompt = server.tokenizer.decode(episode.prompt_ids(episode.calls[1]))
    assert prompt.endswith(f"<|im_start|>assistant\nFive.{END}\n<|im_start|>assistant\n")
    assert episode.calls[1].parent == episode.calls[0].id


UNENFORCEABLE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}


@pytest.mark.parametrize("strict", [True, False, None])
async def test_only_a_strict_schema_must_be_enforceable(server: ModelServer, clients: Clients, strict: Any) -> None:
    server.lines = ['["a"]' + END] * 2
    named: Any = {"name": "x", "schema": UNENFORCEABLE, "strict": strict}
    for dialect, asked in (
        ("chat", {"response_format": {"type": "json_schema", "json_schema": named}}),
        ("responses", {"text": {"format": {"type": "json_schema", **named}}}),
    ):
        if strict:
            with pytest.raises(openai.BadRequestError, match="cannot be enforced"):
                await clients.ask(dialect, **asked)
        else:
            await clients.ask(dialect, **asked)
            assert '{"type": "array", "x-guidance"' in (server.engine.requests[-1].grammar or "")


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("bash_20250124", "bash", {"command": "ls"}),
        (
            "text_editor_20250728",
            "str_replace_based_edit_tool",
            {"command": "insert", "path": "/a", "insert_text": "x"},
        ),
        ("text_editor_20250124", "str_replace_editor", {"command": "undo_edit", "path": "/a", "new_str": "x"}),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
    ],
)
async def test_tools_that_anthropic_defines_and_the_agent_runs_are_described_to_the_model(
    server: ModelServer, clients: Clients, kind: str, name: str, arguments: Any
) -> None:
    server.lines = [call(name, json.dumps(arguments)) + END, "Done." + END]
    tools: Any = [{"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}]
    (used,) = await clients.ask("messages", tools=tools)
    assert (used.type, used.name, used.input) == ("tool_use", name, arguments)
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "ok"}
    turn = {"role": "assistant", "content": [used.to_dict()]}
    await clients.ask("messages", tools=tools, messages=[USER, turn, {"role": "user", "content": [result]}])
    episode = await server.check(calls=2)
    assert episode.calls[1].prompt_origin is PromptOrigin.CONTINUED
    (tool,) = episode.tools(episode.calls[0])
    schema = tool["function"]["parameters"]
    assert arguments.keys() <= schema["properties"].keys()
    assert arguments["command"] in schema["properties"]["command"].get("enum", ["ls"])


@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_of_chat_take_and_give_text(server: ModelServer, clients: Clients, stream: bool) -> None:
    server.lines = [call("shell", json.dumps({"input": 'echo "hé"\n'})) + END, "Done." + END]
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
    tool: Any = {"type": "custom", "custom": {"name": "shell", "description": "Run it.", "format": grammar}}
    asked: Any = {"tools": [tool], "tool_choice": {"type": "custom", "custom": {"name": "shell"}}}
    server.lines[0] = server.lines[0].partition('"arguments": ')[2]
    if stream:
        parts = [part async for part in await clients.openai.chat.completions.create(**CHAT | asked, stream=True)]
        deltas = [given.to_dict() for part in parts for one in part.choices for given in one.delta.tool_calls or ()]
        id, text = deltas[0]["id"], "".join(str(given["custom"]["input"]) for given in deltas)
        assert parts[-1].choices[0].finish_reason == "tool_calls"
    else:
        (made,) = (await clients.ask("chat", **asked)).tool_calls
        id, text = made.id, made.custom.input
        assert (made.type, made.custom.name) == ("custom", "shell")
    assert text == 'echo "hé"\n'
    turn = {
        "role": "assistant",
        "tool_calls": [{"id": id, "type": "custom", "custom": {"name": "shell", "input": text}}],
    }
    said = [USER, turn, {"role": "tool", "tool_call_id": id, "content": "hé"}]
    await clients.ask("chat", tools=[tool], messages=said)
    episode = await server.check(calls=2)
    assert episode.calls[1].prompt_origin is PromptOrigin.CONTINUED
    assert "lark grammar" in server.tokenizer.decode(episode.prompt_ids(episode.calls[0]))


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_are_the_older_form_of_tools(server: ModelServer, clients: Clients, stream: bool) -> None:
    server.lines = [ADD + ADD + END, "Five." + END, "No." + END]
    asked: Any = {"model": "m", "messages": [USER], "functions": FUNCTIONS}
    if stream:
        parts = [part async for part in await clients.openai.chat.completions.create(**asked, stream=True)]
        deltas = [one.delta.function_call for part in parts for one in part.choices if one.delta.function_call]
        made = {"name": deltas[0].name, "arguments": "".join(delta.arguments or "" for delta in deltas)}
        finish = parts[-1].choices[0].finish_reason
    else:
        (choice,) = (await clients.openai.chat.completions.create(**asked)).choices
        assert choice.message.function_call is not None and choice.message.tool_calls is None
        made, finish = choice.message.function_call.to_dict(), choice.finish_reason
    assert finish == "function_call"
    assert made == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    turn = {"role": "assistant", "content": None, "function_call": made}
    said: Any = [USER, turn, {"role": "function", "name": "add", "content": "5"}]
    answer = await clients.openai.chat.completions.create(**asked | {"messages": said, "function_call": "none"})
    assert answer.choices[0].message.content == "Five."
    assert (await server.check(calls=2)).calls[1].prompt_origin is PromptOrigin.CONTINUED
    with pytest.raises(openai.BadRequestError, match="no tool is called 'mul'"):
        await clients.openai.chat.completions.create(**asked | {"function_call": {"name": "mul"}})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bytes_of_logprobs_add_up_to_the_text_even_if_tokens_split_a_character(
    server: ModelServer, clients: Clients, stream: bool
) -> None:
    text = "Zürich 👋 京都"
    server.lines = [text + END, text + END]
    wanted: Any = {"logprobs": True, "top_logprobs": 1, "tools": openai.omit}
    if stream:
        parts = [part async for part in await clients.openai.chat.completions.create(**CHAT | wanted, stream=True)]
        found = [one.logprobs for part in parts for one in part.choices]
    else:
        found = [(await clients.openai.chat.completions.create(**CHAT | wanted)).choices[0].logprobs]
    tokens = [token for logprobs in found if logprobs is not None for token in logprobs.content or ()]
    assert bytes(byte for token in tokens for byte in token.bytes or ()).decode() == text + END
    assert any("\ufffd" in token.token for token in tokens)
    response = await clients.openai.responses.create(**RESPONSES, include=["message.output_text.logprobs"])
    shown = response.output[0].content[0].logprobs
    assert bytes(byte for token in shown for byte in token.bytes).decode().startswith(text)


async def test_every_answer_has_the_id_of_its_request(server: ModelServer, clients: Clients) -> None:
    server.lines = ["Hi." + END] * 2
    answer = await clients.openai.chat.completions.create(**CHAT)
    message = await clients.anthropic.messages.create(**MESSAGES)
    assert [answer._request_id, message._request_id] == [call.id for call in (await server.check(calls=2)).calls]
    with pytest.raises(openai.BadRequestError) as refused:
        await clients.openai.chat.completions.create(**CHAT, temperature=9)
    assert (refused.value.request_id or "").startswith("req_")
    with pytest.raises(anthropic.BadRequestError) as rejected:
        await clients.anthropic.messages.create(**MESSAGES | {"messages": []})
    assert (rejected.value.request_id or "").startswith("req_")


async def test_errors_on_unknown_paths_are_the_clients_and_say_what_is_wrong_with_its_base_url(
    server: ModelServer,
) -> None:
    key: Any = {"api_key": server.key, "max_retries": 0}
    async with (
        openai.AsyncOpenAI(base_url=server.url, **key) as short,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", **key) as usual,
        anthropic.AsyncAnthropic(base_url=f"{server.url}/v1", **key) as long,
        anthropic.AsyncAnthropic(base_url=server.url, **key) as other,
    ):
        with pytest.raises(openai.NotFoundError, match="add /v1 to the client's base URL") as lost:
            await short.chat.completions.create(**CHAT)
        assert (lost.value.type, lost.value.code) == ("not_found_error", "not_found")
        with pytest.raises(openai.NotFoundError, match="is not served"):
            await usual.files.list()
        for client, post, hint in (
            (long, "/v1/messages", "remove /v1 from the client's base URL"),
            (other, "/v1/messages/batches", "is not served"),
            (other, "/files", "there is nothing at"),
        ):
            with pytest.raises(anthropic.NotFoundError, match=hint) as missing:
                await client.post(post, body={}, cast_to=object)
            body: Any = missing.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
        with pytest.raises(anthropic.NotFoundError) as missing:
            server.service.gateway.models = {}
            await other.models.retrieve("m")
        assert missing.value.body["type"] == "error"
        with pytest.raises(anthropic.APIStatusError) as wrong:
            await other.get("/v1/messages", cast_to=object)
        assert wrong.value.body["type"] == "error"


async def test_what_has_no_effect_is_said_once(
    server: ModelServer, clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    server.say = lambda _: "Hi." + END
    for _ in range(2):
        await clients.ask(
            "chat", logit_bias={"5": 3}, audio={"voice": "ash", "format": "wav"}, user="me", prediction=None
        )
        await clients.ask("responses", text={"verbosity": "low"}, max_tool_calls=3)
        await clients.ask("messages", extra_body={"context_management": {"edits": [{"type": "x"}]}})
    said = [record.message.rpartition(": ")[2] for record in caplog.records if "no effect" in record.message]
    assert said == ["logit_bias", "audio", "max_tool_calls", "verbosity", "context_management"]
    assert (await server.episode()).calls[0].request["logit_bias"] == {"5": 3}
