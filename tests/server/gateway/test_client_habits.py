"""What clients make of a conversation on its way back, and that its turns keep their tokens all the same."""

import json
from typing import Any, get_type_hints

import aiohttp
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsNonStreaming as BetaMessageParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming as MessageParams
from modelserving import END, ModelServer, call
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming as ResponseParams

from leyden.records import PromptOrigin
from leyden.rl.signals.finding import find
from leyden.server.gateway.dialects.types import PREFIX
from leyden.server.gateway.prompts.history import History
from leyden.server.gateway.prompts.text_index import segment

USER = {"role": "user", "content": "What is 2 + 3?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": SCHEMA}}


async def post(server: ModelServer, path: str, **body: Any) -> Any:
    headers = {"authorization": f"Bearer {server.key}", "anthropic-version": "2023-06-01"}
    url = f"{server.url}/v1/{path}"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        return answer


async def chat(server: ModelServer, *messages: Any, tools: Any = (ADD, SUB), **more: Any) -> Any:
    answer = await post(server, "chat/completions", model="m", messages=messages, tools=list(tools), **more)
    return answer["choices"][0]["message"]


async def messages(server: ModelServer, *said: Any, **more: Any) -> list[Any]:
    answer = await post(server, "messages", model="m", max_tokens=500, messages=said, **more)
    return list(answer["content"])


async def test_a_result_without_the_id_of_its_call_is_matched_by_id_by_name_or_by_order(server: ModelServer) -> None:
    server.lines = [call("add", '{"a": 2, "b": 3}') + call("sub", '{"a": 9, "b": 1}') + END, "5, 8" + END] * 3
    for named in ("id", "name", "order"):
        answer = await chat(server, {**USER, "content": named})
        first, second = answer["tool_calls"]
        results: list[Any] = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "8"}]
        if named == "id":
            results = [{**results[1], "id": second["id"]}, {**results[0], "id": first["id"]}]
        if named == "name":
            results = [{**results[1], "name": "sub"}, {**results[0], "name": "add"}]
        await chat(server, {**USER, "content": named}, answer, *results)
        last = (await server.episode()).calls[-1]
        assert last.prompt_origin is PromptOrigin.CONTINUED
        wanted = {first["id"]: "5", second["id"]: "8"}
        assert {made["tool_call_id"]: made["content"] for made in last.messages} == wanted


async def test_a_number_that_javascript_writes_differently_is_the_same_argument(server: ModelServer) -> None:
    server.lines = [call("add", '{"a": 2.0, "b": [1e3, -0.0, 12345678901234567890]}') + END, "Done" + END]
    answer = await chat(server, USER)
    answer["tool_calls"][0]["function"]["arguments"] = '{"a":2,"b":[1000,0,12345678901234567000]}'
    await chat(server, USER, answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "5"})
    assert (await server.check(calls=2)).calls[1].prompt_origin is PromptOrigin.CONTINUED


async def test_an_argument_that_no_float_can_hold_is_compared_as_text(server: ModelServer) -> None:
    server.lines = [call("add", '{"a": 1' + "0" * 400 + "}") + END, "Done" + END]
    answer = await chat(server, USER)
    await chat(server, USER, answer, {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "5"})
    assert (await server.check(calls=2)).calls[1].prompt_origin is PromptOrigin.CONTINUED


def test_reasoning_distinguishes_histories_and_does_not_count_for_their_size() -> None:
    long, other = (
        History.of([USER, {"role": "assistant", "content": "5", "reasoning_content": "Hm. " * count}], (), "m")
        for count in (10_000, 10_001)
    )
    assert long.digests[-1] != other.digests[-1]
    assert long.sizes[-1] < 1000


def test_the_completion_at_the_end_of_a_text_is_not_the_beginning_of_an_answer() -> None:
    completion = {"role": "assistant", "content": " upon a time"}
    assert not History.of([segment("Once"), completion], (), "m").prefilled
    assert History.of([USER, {**completion, PREFIX: True}], (), "m").prefilled


@pytest.mark.parametrize("dropped", ["text", "reasoning", "both"])
async def test_a_client_that_drops_a_part_of_an_answer_continues_it_and_the_record_says_so(
    server: ModelServer, dropped: str
) -> None:
    thought = "<think>\nTwo and three.\n</think>\n\n"
    server.lines = [thought + "Let me add." + call("add", '{"a": 2, "b": 3}') + END, "It is 5." + END, "Bye" + END]
    answer = await chat(server, USER)
    assert (answer["content"], answer["reasoning_content"]) == ("Let me add.", "Two and three.")
    given = dict(answer)
    if dropped in ("text", "both"):
        given["content"] = None
    if dropped in ("reasoning", "both"):
        del given["reasoning_content"]
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "5"}
    second = await chat(server, USER, given, result)
    # a client may also drop it only later, as coding agents do with the reasoning of earlier turns
    await chat(server, USER, {**given, "reasoning_content": None}, result, second, {"role": "user", "content": "Bye"})
    episode = await server.check(calls=3)
    assert [made.prompt_origin for made in episode.calls[1:]] == [PromptOrigin.CONTINUED] * 2
    why = episode.calls[1].origin_reason
    assert ("text beside a tool call" in why) == (dropped in ("text", "both"))
    assert ("reasoning" in why) == (dropped in ("reasoning", "both"))
    assert "reasoning" in episode.calls[2].origin_reason
    assert episode.messages(episode.calls[1])[1]["content"] == "Let me add."  # the prompt holds what was sampled


async def test_text_that_was_changed_and_not_dropped_is_another_answer(server: ModelServer) -> None:
    server.lines = ["Let me add." + call("add", '{"a": 2, "b": 3}') + END, "It is 5." + END]
    answer = await chat(server, USER)
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "5"}
    await chat(server, USER, {**answer, "content": "Let me subtract."}, result)
    last = (await server.check(calls=2)).calls[1]
    assert last.prompt_origin is PromptOrigin.RERENDERED
    assert "Let me subtract." in server.tokenizer.decode((await server.episode()).prompt_ids(last))


@pytest.mark.parametrize("identified", ["by reasoning", "by tool call ids"])
async def test_a_branch_from_the_first_of_two_answers_with_equal_text_continues_the_first(
    server: ModelServer, identified: str
) -> None:
    said = call("add", '{"a": 2, "b": 3}') if identified == "by tool call ids" else "Five."
    server.lines = [f"<think>\n{thought}\n</think>\n\n{said}{END}" for thought in ("Easy.", "Hard.")] + ["Ok" + END] * 2
    answers = [await chat(server, USER) for _ in range(2)]
    for answer in answers:
        if identified == "by tool call ids":
            del answer["reasoning_content"]
        calls = answer.get("tool_calls") or ()
        follow = [{"role": "tool", "tool_call_id": made["id"], "content": "5"} for made in calls]
        await chat(server, USER, answer, *(follow or [{"role": "user", "content": "Sure?"}]))
    first, second, *branches = (await server.check(calls=4)).calls
    assert [branch.parent for branch in branches] == [first.id, second.id]
    assert [branch.prompt_origin for branch in branches] == [PromptOrigin.CONTINUED] * 2


@pytest.mark.parametrize("edited", ["answer", "result"])
async def test_turns_before_an_edited_message_keep_their_tokens(server: ModelServer, edited: str) -> None:
    odd = call("add", '{"b":3,   "a":2}')  # no template writes it so
    server.lines = [odd + END, odd + END, "It is 5." + END, "Bye" + END]
    said: list[Any] = [USER]
    for _ in range(2):
        said.append(await chat(server, *said))
        result = {"role": "tool", "tool_call_id": said[-1]["tool_calls"][0]["id"], "content": "a long result"}
        said.append(result)
    said.append(await chat(server, *said))
    if edited == "answer":
        said[3] = {"role": "assistant", "content": "I added them."}
        del said[4]
    else:
        said[2] = {**said[2], "content": "cut"}
    await chat(server, *said, {"role": "user", "content": "Bye?"})
    episode = await server.check(calls=4)
    last, intact = episode.calls[3], episode.calls[0]
    assert (last.prompt_origin, last.parent) == (PromptOrigin.RERENDERED, intact.id)
    assert "edited after message 2" in last.origin_reason
    tokens = episode.prompt_ids(intact) + intact.completion_ids
    assert last.kept_ids == len(tokens)
    assert episode.prompt_ids(last)[: len(tokens)] == tokens
    text = server.tokenizer.decode(episode.prompt_ids(last))
    assert text.count("I added them." if edited == "answer" else "cut") == 1
    assert text.count('{"b":3,   "a":2}') == 1
    after = text.partition("</tool_call><|im_end|>")[2]
    assert after.startswith("\n<|im_start|>user\n<tool_response>")
    assert after.endswith("It is 5.<|im_end|>\n<|im_start|>user\nBye?<|im_end|>\n<|im_start|>assistant\n")


async def test_tokens_of_a_conversation_that_ends_with_an_answer_are_counted(server: ModelServer) -> None:
    server.lines = [call("add", '{"b":3,   "a":2}') + END]
    tool = {"name": "add", "input_schema": SCHEMA}
    content = await messages(server, USER, tools=[tool])
    counts = []
    for last in (content, "Some text that was never sampled"):
        said = [USER, {"role": "assistant", "content": last}]
        counts.append(await post(server, "messages/count_tokens", model="m", messages=said, tools=[tool]))
    (made,) = (await server.check(calls=1)).calls
    assert counts[0] == {"input_tokens": len(made.prompt_ids) + len(made.completion_ids)}
    assert counts[1]["input_tokens"] > len(made.prompt_ids)


async def test_one_call_at_a_time_in_chat_and_messages(server: ModelServer) -> None:
    both = call("add", '{"a": 1}') + call("sub", "{}") + END
    server.lines = [both, both, "Done." + END]
    (made,) = (await chat(server, USER, parallel_tool_calls=False))["tool_calls"]
    assert made["function"]["name"] == "add"
    tools = [{"name": "add", "input_schema": SCHEMA}, {"name": "sub", "input_schema": SCHEMA}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    (block,) = await messages(server, USER, tools=tools, tool_choice=choice)
    assert (block["type"], block["name"]) == ("tool_use", "add")


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_is_signed(server: ModelServer, stream: bool) -> None:
    server.lines = ["<think>\nHm.\n</think>\n\nYes." + END]
    if not stream:
        thinking = (await messages(server, USER, thinking={"type": "adaptive"}))[0]
        assert thinking["type"] == "thinking"
        assert thinking["signature"]
        return
    body = {"model": "m", "max_tokens": 99, "messages": [USER], "stream": True, "thinking": {"type": "adaptive"}}
    headers = {"x-api-key": server.key}
    url = f"{server.url}/v1/messages"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as reply:
        lines = (await reply.text()).splitlines()
    deltas = [json.loads(line.removeprefix("data: ")).get("delta", {}) for line in lines if line.startswith("data: ")]
    signed = [delta["signature"] for delta in deltas if delta.get("type") == "signature_delta"]
    assert len(signed) == 1
    assert signed[0]


async def test_a_deferred_tool_is_shown_when_it_has_been_referred_to(server: ModelServer) -> None:
    search = {"name": "search", "input_schema": {"type": "object"}}
    deferred = {"name": "weather", "description": "Tell it.", "input_schema": SCHEMA, "defer_loading": True}
    server.lines = [call("search", "{}") + END, call("weather", '{"a": 1, "b": 2}') + END, "Sunny." + END]
    said: list[Any] = [USER]
    for result in ([{"type": "tool_reference", "tool_name": "weather"}], "sun"):
        content = await messages(server, *said, tools=[search, deferred])
        said.append({"role": "assistant", "content": content})
        used = [{"type": "tool_result", "tool_use_id": content[-1]["id"], "content": result}]
        said.append({"role": "user", "content": used})
    await messages(server, *said, tools=[search, deferred])
    episode = await server.check(calls=3)
    assert [made.prompt_origin for made in episode.calls[1:]] == [PromptOrigin.CONTINUED] * 2
    first, second = (server.tokenizer.decode(episode.prompt_ids(made)) for made in episode.calls[:2])
    assert "weather" not in first
    assert second.count('"name": "weather"') == 1
    assert second.index('"name": "weather"') > second.index("<tool_response>")
    assert "unknown_tool" not in {str(signal.kind) for signal in find(episode)}


@pytest.mark.parametrize("dialect", ["prefix", "continue_final_message", "messages"])
async def test_a_prefilled_answer_is_context_that_the_model_continues(server: ModelServer, dialect: str) -> None:
    server.lines = [" 5, of course." + END, "Bye" + END]
    prefill = {"role": "assistant", "content": "It is", **({"prefix": True} if dialect == "prefix" else {})}

    async def ask(*said: Any) -> str:
        if dialect != "messages":
            return str((await chat(server, *said, continue_final_message=dialect != "prefix"))["content"])
        return str((await messages(server, *said))[0]["text"])

    assert await ask(USER, prefill) == " 5, of course."
    server.forget_attempts()
    whole = {"role": "assistant", "content": "It is 5, of course."}
    await ask(USER, whole, {"role": "user", "content": "Bye"})
    episode = await server.check(calls=2)
    first, second = episode.calls
    prompt = server.tokenizer.decode(episode.prompt_ids(first))
    assert prompt.endswith("<|im_start|>assistant\nIt is")
    assert server.tokenizer.decode(first.completion_ids) == " 5, of course." + END
    assert (second.prompt_origin, second.parent) == (PromptOrigin.CONTINUED, first.id)


async def ask(server: ModelServer, dialect: str, *said: Any) -> tuple[str, str, str]:
    """Ask in a dialect, with `add` as a tool; return the text of the answer, and the id and arguments of its call."""
    about = {"name": "add", "parameters": SCHEMA}
    if dialect == "chat":
        absent = {"description": None, "strict": False}  # means the same as nothing
        message = await chat(server, *said, tools=[{"type": "function", "function": {**about, **absent}}])
        (made,) = message.get("tool_calls") or ({"id": "", "function": {"arguments": ""}},)
        return message["content"], made["id"], made["function"]["arguments"]
    if dialect == "messages":
        text, *calls = await messages(server, *said, tools=[{"name": "add", "input_schema": SCHEMA}])
        (block,) = calls or ({"id": "", "input": {}},)
        return text["text"], block["id"], json.dumps(block["input"])
    answer = await post(server, "responses", model="m", input=said, tools=[{"type": "function", **about}])
    item, *calls = answer["output"]
    (made,) = calls or ({"call_id": "", "arguments": ""},)
    return item["content"][0]["text"], made["call_id"], made["arguments"]


def given_back(dialect: str, text: str, id: str, arguments: str) -> list[Any]:
    """An answer with a call, and the call's result, as a client of the dialect sends them."""
    if dialect == "chat":
        made = {"id": id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        answer = {"role": "assistant", "content": text, "tool_calls": [made]}
        return [answer, {"role": "tool", "tool_call_id": id, "content": "5"}]
    if dialect == "messages":
        use = {"type": "tool_use", "id": id, "name": "add", "input": json.loads(arguments)}
        result = {"type": "tool_result", "tool_use_id": id, "content": "5"}
        answer = {"role": "assistant", "content": [{"type": "text", "text": text}, use]}
        return [answer, {"role": "user", "content": [result]}]
    made = {"type": "function_call", "call_id": id, "name": "add", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": id, "output": "5"}
    return [{"role": "assistant", "content": text}, made, output]


@pytest.mark.parametrize("first", ["chat", "messages", "responses"])
@pytest.mark.parametrize("second", ["chat", "messages", "responses"])
async def test_an_answer_may_be_given_back_in_any_dialect(server: ModelServer, first: str, second: str) -> None:
    server.lines = ["I add. " + call("add", '{"b":3.0,   "a":2}') + END, "It is 5." + END]
    answer = await ask(server, first, USER)
    text, _, _ = await ask(server, second, USER, *given_back(second, *answer))
    assert text == "It is 5."
    assert (await server.check(calls=2)).calls[1].prompt_origin is PromptOrigin.CONTINUED


def nulls(*parameters: type, without: str) -> dict[str, Any]:
    """Every parameter that an SDK knows, as null."""
    return dict.fromkeys({name for given in parameters for name in get_type_hints(given)} - set(without.split()))


TEXT = {"type": "text", "text": "Hi", "cache_control": None, "citations": None}
CALLED = {"id": "c1", "type": "function", "index": None, "function": {"name": "add", "arguments": "{}"}}
NULLS = {
    "chat/completions": {
        **nulls(ChatParams, without="model messages"),
        "tools": [{"type": "function", "function": {"name": "add", **dict.fromkeys(["parameters", "strict"])}}],
        "messages": [
            {"role": "developer", "content": "Be brief.", "name": None},
            {"role": "user", "content": [TEXT], "name": None},
            {
                "role": "assistant",
                "tool_calls": [CALLED],
                **dict.fromkeys(["content", "refusal", "audio", "annotations"]),
            },
            {"role": "tool", "tool_call_id": "c1", "content": "5", "name": None},
            {"role": "assistant", "content": "Five", "tool_calls": None, "reasoning_content": None},
            USER,
        ],
    },
    "messages": {
        **nulls(MessageParams, BetaMessageParams, without="model messages max_tokens betas"),
        "max_tokens": 9,
        "tools": [{"name": "add", "input_schema": SCHEMA, **dict.fromkeys(["type", "description", "defer_loading"])}],
        "messages": [
            {"role": "user", "content": [TEXT]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": None},
                    TEXT,
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {}, **dict.fromkeys(["caller"])},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", **dict.fromkeys(["content", "is_error"])}],
            },
        ],
    },
    "responses": {
        **nulls(ResponseParams, without="model input"),
        "text": {"format": None, "verbosity": None},
        "reasoning": {"effort": None, "summary": None},
        "tools": [
            {"type": "function", "name": "add", **dict.fromkeys(["description", "parameters", "strict"])},
            {"type": "custom", "name": "shell", "description": None, "format": None},
            {"type": "namespace", "name": "crm", "description": None, "tools": [{"type": "function", "name": "add"}]},
        ],
        "input": [
            {"type": None, "role": "user", "content": "Hi", "id": None, "status": None, "phase": None},
            {"type": "reasoning", **dict.fromkeys(["id", "summary", "content", "encrypted_content", "status"])},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "", "annotations": None, "logprobs": None}],
            },
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "add",
                **dict.fromkeys(["id", "arguments", "namespace"]),
            },
            {
                "type": "custom_tool_call",
                "call_id": "c2",
                "name": "shell",
                "input": "ls",
                "id": None,
                "namespace": None,
            },
            {"type": "function_call_output", "call_id": "c1", "id": None, "output": None, "status": None},
            {"type": "custom_tool_call_output", "call_id": "c2", "id": None, "output": "a"},
        ],
    },
    "completions": {**nulls(CompletionParams, without="model prompt"), "prompt": "Once"},
}


@pytest.mark.parametrize("path", NULLS)
async def test_every_parameter_that_an_sdk_knows_may_be_null(server: ModelServer, path: str) -> None:
    server.lines = ["Five." + END]
    await post(server, path, model="m", **NULLS[path])
    (made,) = (await server.check(calls=1)).calls
    assert server.tokenizer.decode(made.completion_ids) == "Five." + END
