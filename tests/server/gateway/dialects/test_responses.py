"""The OpenAI Responses dialect, through the official client, unmodified, and against its typed models."""

import json
from typing import Any

import aiohttp
import openai
import pydantic
import pytest
from modelserving import END, ModelServer, call
from responses_oracle import check_response, stream_events

from leyden.engine.protocol import EngineError
from leyden.records import PromptOrigin, Purpose
from leyden.server.gateway.dialects.custom_tools import CustomInput
from leyden.server.gateway.dialects.types import ToolCall

ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "strict": None,
}
SHELL: Any = {"type": "custom", "name": "shell", "description": "Run a command."}
QUESTION = "What is 2 + 3?"


async def post(server: ModelServer, **body: Any) -> tuple[int, Any]:
    """Send a raw request."""
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {server.key}"}) as session,
        session.post(f"{server.url}/v1/responses", json={"model": "m", **body}) as reply,
    ):
        return reply.status, await reply.json()


def given_back(response: Any) -> list[Any]:
    """The output items as an agent sends them back."""
    return [item.model_dump(exclude_unset=True) for item in response.output]


def sums(response: Any) -> list[Any]:
    """The results of the calls of `add`."""
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": str(sum(json.loads(item.arguments).values())),
        }
        for item in response.output
        if item.type == "function_call"
    ]


async def test_a_conversation_with_a_tool_keeps_its_tokens(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["Let me see. " + call("add", '{"b":3,  "a": 2}') + END, "It is 5." + END, "You are welcome!" + END]
    history: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    options: Any = {"model": "any-name", "instructions": "You can add.", "tools": [ADD], "store": False}
    first = await client.responses.create(input=history, **options)
    assert first.model == "any-name"
    assert [item.type for item in first.output] == ["message", "function_call"]
    history += given_back(first) + sums(first)
    second = await client.responses.create(input=history, **options)
    assert (second.output_text, second.status) == ("It is 5.", "completed")
    history += [*given_back(second), {"role": "user", "content": [{"type": "input_text", "text": "Thanks"}]}]
    third = await client.responses.create(input=history, **options)
    assert third.output_text == "You are welcome!"
    episode = await server.check(calls=3)
    assert [c.prompt_origin for c in episode.calls] == ["fresh", "continued", "continued"]
    assert [m["role"] for m in episode.messages(episode.calls[0])] == ["system", "system", "user"]
    assert third.usage is not None
    assert third.usage.input_tokens == len(episode.prompt_ids(episode.calls[2]))
    assert third.usage.output_tokens == len(episode.calls[2].completion_ids)


async def test_a_stream_has_every_event_in_order(server: ModelServer) -> None:
    server.lines = ["Let me see. " + call("add", '{"a": 2, "b": 3}') + END]
    events = await stream_events(server.url, server.key, {"model": "m", "input": QUESTION, "tools": [ADD]})
    kinds = [event["type"].removeprefix("response.") for event in events]
    without_deltas = [kind for kind in kinds if not kind.endswith(".delta")]
    assert without_deltas == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert {"output_text.delta", "function_call_arguments.delta"} <= set(kinds)
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    final = events[-1]["response"]
    assert said == final["output"][0]["content"][0]["text"] == "Let me see. "
    arguments = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    assert json.loads(arguments) == json.loads(final["output"][1]["arguments"]) == {"a": 2, "b": 3}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert events[0]["response"]["status"] == "in_progress"
    assert (final["status"], events[0]["response"]["id"]) == ("completed", final["id"])


@pytest.mark.parametrize("summary", [None, "auto"])
async def test_reasoning_is_streamed_in_its_own_item(server: ModelServer, summary: str | None) -> None:
    server.lines = ["<think>\nTwo and three make five, I think.\n</think>\n\nIt is five, of course." + END]
    body = {"model": "m", "input": QUESTION, "reasoning": {"summary": summary}}
    events = await stream_events(server.url, server.key, body)
    kinds = [event["type"].removeprefix("response.") for event in events]
    part, text = ("reasoning_summary_part", "reasoning_summary_text") if summary else ("content_part", "reasoning_text")
    assert [kind for kind in kinds if not kind.endswith(".delta")] == [
        *("created", "in_progress"),
        *("output_item.added", f"{part}.added", f"{text}.done", f"{part}.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    deltas = [event["delta"] for event in events if event["type"] == f"response.{text}.delta"]
    assert len(deltas) > 1
    thought, said = events[-1]["response"]["output"]
    assert "".join(deltas).strip() == thought["summary" if summary else "content"][0]["text"].strip()
    assert said["content"][0]["text"] == "It is five, of course."


async def test_the_stream_helper_gives_what_the_whole_response_gives(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    answer = call("add", '{"a": 1, "b": 2}') + call("add", '{"a": 3, "b": 4}') + END
    server.lines = [answer, answer]
    whole = await client.responses.create(model="m", input=QUESTION, tools=[ADD])
    async with client.responses.stream(model="m", input=QUESTION, tools=[ADD]) as stream:
        final = await stream.get_final_response()
    for response in whole, final:
        assert [json.loads(item.arguments) for item in response.output] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert len({item.id for item in response.output}) == 2
    await server.check(calls=2)


async def test_answers_are_parsed_into_a_type(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    class Answer(pydantic.BaseModel):
        value: int

    server.lines = ['{"value": 5}' + END] * 2
    parsed = await client.responses.parse(model="m", input=QUESTION, text_format=Answer)
    assert parsed.output_parsed == Answer(value=5)
    async with client.responses.stream(model="m", input=QUESTION, text_format=Answer) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Answer(value=5)
    status, error = await post(server, input=QUESTION, text={"format": {"type": "yaml"}})
    assert (status, error["error"]["param"]) == (400, "text.format")


async def test_custom_tools_take_and_give_text(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [call("shell", '{"input": "ls -l\\n"}') + END, "Two files." + END]
    history: list[Any] = [{"role": "user", "content": "List the files."}]
    grammar = {"type": "grammar", "syntax": "regex", "definition": "ls.*"}
    options: Any = {"model": "m", "tools": [{**SHELL, "format": grammar}]}
    events = await stream_events(server.url, server.key, {"input": history, **options})
    response = check_response(events[-1]["response"])
    (item,) = response.output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("shell", "ls -l\n")
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 1  # as they are sampled
    assert "".join(deltas) == item.input
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in kinds[2:-1] if not kind.endswith(".delta")] == [
        *("output_item.added", "custom_tool_call_input.done", "output_item.done")
    ]
    output = {
        "type": "custom_tool_call_output",
        "call_id": item.call_id,
        "output": [{"type": "input_text", "text": "a b"}],
    }
    second = await client.responses.create(input=[*history, *given_back(response), output], **options)
    assert second.output_text == "Two files."
    episode = await server.check(calls=2)
    assert episode.calls[1].prompt_origin is PromptOrigin.CONTINUED
    assert "ls.*" in episode.tools(episode.calls[0])[0]["function"]["description"]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (r'{"input": "a\n\"b\" \\ \u00e9\ud83d\ude00 é😀\/"}', 'a\n"b" \\ é😀 é😀/'),
        ('{"input": ""}', ""),
        ('{"other": 1, "input": "late"}', "late"),  # known when the call is complete
        ('{"input": "first", "input": "second"}', "first"),  # what was sent stands
        ('{"input": "cut', "cut"),
        (r'{"input": "half \ud83d\u0041"}', "half "),
        ('{"command": "ls"}', '{"command": "ls"}'),
        ('["ls"]', '["ls"]'),
    ],
)
def test_the_input_of_a_custom_tool_is_decoded_as_it_is_sampled(arguments: str, given: str, size: int) -> None:
    if size == 1000 and "half" in arguments:
        given = arguments  # nothing was sent before it turned out to be no JSON
    reader = CustomInput()
    parts = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    parts.append(reader.finish(ToolCall("c", "shell", arguments)))
    assert "".join(parts) == reader.text == given


async def test_tools_in_a_namespace_are_told_apart(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [call("crm__add", '{"a": 1, "b": 2}') + END, "Done." + END, "Done again." + END]
    tools: Any = [ADD, {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [ADD, SHELL]}]
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    first = await client.responses.create(model="m", input=history, tools=tools)
    check_response(first.model_dump(mode="json", by_alias=True, exclude_unset=True))
    (item,) = first.output
    assert item.type == "function_call"
    assert (item.name, item.namespace) == ("add", "crm")
    history += given_back(first) + sums(first)
    await client.responses.create(model="m", input=history, tools=tools)
    shown = {
        tool["function"]["name"] for tool in (await server.check(calls=2)).tools((await server.episode()).calls[0])
    }
    assert shown == {"add", "crm__add", "crm__shell"}
    assert (await server.episode()).calls[1].prompt_origin is PromptOrigin.CONTINUED


async def test_a_chosen_tool_is_called(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [' {"a": 1, "b": 2}}\n</tool_call>' + END, "No." + END, "Yes." + END]
    forced = await client.responses.create(
        model="m", input=QUESTION, tools=[ADD, SHELL], tool_choice={"type": "function", "name": "add"}
    )
    assert forced.output[0].type == "function_call"
    await client.responses.create(model="m", input=QUESTION, tools=[ADD, SHELL], tool_choice="none")
    allowed: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "shell"}]}
    await client.responses.create(model="m", input=QUESTION, tools=[ADD, SHELL], tool_choice=allowed)
    episode = await server.check(calls=3)
    shown = [[tool["function"]["name"] for tool in episode.tools(c)] for c in episode.calls]
    assert shown == [["add", "shell"]] * 3  # the prompt is the same
    status, error = await post(server, input=QUESTION, tools=[ADD], tool_choice={"type": "function", "name": "sub"})
    assert (status, error["error"]["param"]) == (400, "tool_choice")


async def test_explicit_nulls_are_defaults(server: ModelServer) -> None:
    server.lines = ["Five." + END]
    names = (
        "background conversation include instructions max_output_tokens max_tool_calls metadata parallel_tool_calls "
        "previous_response_id prompt prompt_cache_key reasoning safety_identifier service_tier store stream "
        "stream_options temperature text tool_choice tools top_logprobs top_p truncation user"
    )
    nulls: dict[str, Any] = dict.fromkeys(names.split())
    message = {"type": "message", "role": "user", "id": None, "status": None}
    content = [{"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "2 + 3?"}]
    status, document = await post(server, input=[{**message, "content": content}], client_metadata={"a": "b"}, **nulls)
    assert status == 200, document
    response = check_response(document)
    assert (response.output_text, response.parallel_tool_calls, response.tool_choice) == ("Five.", True, "auto")
    (made,) = (await server.check(calls=1)).calls
    assert made.messages == ({"role": "user", "content": QUESTION},)
    assert made.request["client_metadata"] == {"a": "b"}


async def test_an_answer_that_reaches_its_limit_is_incomplete(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["One two three four five six seven" + END] * 2
    whole = await client.responses.create(model="m", input="Count.", max_output_tokens=3)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    events = await stream_events(server.url, server.key, {"model": "m", "input": "Count.", "max_output_tokens": 3})
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_a_stream_that_fails_ends_with_the_failed_response(server: ModelServer) -> None:
    def say(prompt: str) -> str:
        raise EngineError("out of memory")

    server.say = say
    events = await stream_events(server.url, server.key, {"model": "m", "input": QUESTION})
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "out of memory" in events[-1]["response"]["error"]["message"]


async def test_logprobs_are_given_where_they_are_wanted(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["Five of them." + END] * 3
    plain = await client.responses.create(model="m", input=QUESTION)
    assert plain.output[0].content[0].logprobs == []
    wanted: Any = {"model": "m", "input": QUESTION, "include": ["message.output_text.logprobs"]}
    whole = await client.responses.create(**wanted)
    episode = await server.check(calls=2)
    logprobs = whole.output[0].content[0].logprobs
    assert [token.logprob for token in logprobs] == pytest.approx(episode.calls[1].logprobs)
    events = await stream_events(server.url, server.key, wanted)
    streamed = [token for e in events if e["type"] == "response.output_text.delta" for token in e["logprobs"]]
    assert [token["token"] for token in streamed] == [token.token for token in logprobs]


async def test_the_oldest_messages_are_dropped_where_all_do_not_fit(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.say = lambda _: "Five." + END
    server.engine.context_length = 400
    calls = [{"type": "function_call", "call_id": f"c{at}", "name": "add", "arguments": "{}"} for at in range(8)]
    outputs = [{"type": "function_call_output", "call_id": f"c{at}", "output": "word " * 20} for at in range(8)]
    turns = [item for pair in zip(calls, outputs, strict=True) for item in pair]
    request: Any = {"model": "m", "instructions": "You can add.", "max_output_tokens": 30}
    history: Any = [{"role": "user", "content": "What is 1 + 1?"}, *turns, {"role": "user", "content": QUESTION}]
    with pytest.raises(openai.BadRequestError, match="takes 400"):
        await client.responses.create(input=history, **request)
    response = await client.responses.create(input=history, truncation="auto", **request)
    assert (response.output_text, response.truncation) == ("Five.", "auto")
    short = await client.responses.create(input=QUESTION, truncation="auto", **request)
    assert short.status == "completed"
    first, second = (await server.check(calls=2)).calls
    shown = (await server.episode()).messages(first)
    roles = [message["role"] for message in shown]
    kept = (len(roles) - 2) // 2
    assert roles == ["system", *["assistant", "tool"] * kept, "user"]
    assert 0 < kept < 8
    assert [m["tool_call_id"] for m in shown if m["role"] == "tool"] == [f"c{at}" for at in range(8 - kept, 8)]
    used = len((await server.episode()).prompt_ids(first))
    assert used + 30 <= 400 < used + 30 + used // kept  # no more was dropped than necessary
    assert (first.prompt_origin, second.origin_reason) == (PromptOrigin.RERENDERED, "")
    assert (
        first.origin_reason == f"the oldest {1 + 2 * (8 - kept)} messages did not fit into the context and were dropped"
    )
    server.engine.context_length = 100
    too_long = [{"role": "user", "content": "word " * 200}]
    with pytest.raises(openai.BadRequestError, match="takes 100"):
        await client.responses.create(input=too_long, truncation="auto", **request)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_answer_without_parallel_calls_ends_after_the_first_one(
    server: ModelServer, client: openai.AsyncOpenAI, stream: bool
) -> None:
    both = call("add", '{"a": 2, "b": 3}') + "\n" + call("add", '{"a": 4, "b": 5}')
    server.lines = ["I add. " + both + END, call("add", '{"a": 4, "b": 5}') + END, "Done." + END]
    request: Any = {"model": "m", "tools": [ADD], "parallel_tool_calls": False, "store": False}
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    for _ in range(3):
        if stream:
            async with client.responses.stream(input=history, **request) as events:
                response: Any = await events.get_final_response()
        else:
            response = await client.responses.create(input=history, **request)
        assert sum(item.type == "function_call" for item in response.output) <= 1
        history += given_back(response) + sums(response)
    assert response.output_text == "Done."
    episode = await server.check(calls=3)
    texts = [server.tokenizer.decode(made.completion_ids) for made in episode.calls]
    assert texts[0] == "I add. " + call("add", '{"a": 2, "b": 3}')  # what was sampled after the call is dropped
    assert texts[1].endswith(END)  # its own end stays
    assert [made.prompt_origin for made in episode.calls] == [PromptOrigin.FRESH, *[PromptOrigin.CONTINUED] * 2]
    assert len(episode.calls[0].logprobs or ()) == len(episode.calls[0].completion_ids)


async def test_reasoning_tokens_are_counted(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["<think>\nTwo and three.\n</think>\n\nFive." + END, "Six." + END]
    response = await client.responses.create(model="m", input=QUESTION)
    count = len(server.tokenizer.encode("<think>\nTwo and three."))
    stored = await client.responses.retrieve(response.id)
    for answer in (response, stored):
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == count
    plain = await client.responses.create(model="m", input=QUESTION)
    assert plain.usage is not None
    assert plain.usage.output_tokens_details.reasoning_tokens == 0


async def test_search_that_agents_offer_by_default_is_not_shown_to_the_model(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = ["Five." + END]
    tools: Any = [{"type": "web_search", "external_web_access": True}, ADD, {"type": "image_generation"}]
    response = await client.responses.create(model="m", input=QUESTION, tools=tools)
    assert [tool.type for tool in response.tools] == ["function"]
    (made,) = (await server.check(calls=1)).calls
    assert [tool["function"]["name"] for tool in made.tools or ()] == ["add"]
    assert made.request["responses"]["left_out_tools"] == ["web_search", "image_generation"]
    status, document = await post(server, input=QUESTION, tools=tools, tool_choice={"type": "web_search"})
    assert (status, document["error"]["param"]) == (400, "tool_choice")


async def test_sampling_is_the_callers_in_evaluation(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    key = await server.new_attempt("eval", Purpose.EVAL)
    server.lines = ["Five." + END]
    await client.with_options(api_key=key).responses.create(model="m", input=QUESTION, temperature=0.5, top_p=0.9)
    (made,) = (await server.check(calls=1)).calls
    assert (made.sampling.temperature, made.sampling.top_p) == (0.5, 0.9)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": QUESTION, "conversation": "conv_1"}, "conversation"),
        ({"input": QUESTION, "background": True}, "background"),
        ({"input": QUESTION, "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": QUESTION, "tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"input": QUESTION, "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": QUESTION, "temperature": 3}, "temperature"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "local_shell_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": ["text"]}, "input[0]"),
        ({}, "input"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(server: ModelServer, body: Any, param: str) -> None:
    status, document = await post(server, **body)
    assert (status, document["error"]["param"]) == (400, param)
