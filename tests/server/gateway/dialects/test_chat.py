"""The OpenAI chat dialect, through the official client, unmodified."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from modelserving import END, ModelServer, call, eventually, model_server

from leyden.api.client import Remote
from leyden.records import CallStatus, PromptOrigin, Purpose, Sampling, Version
from leyden.rl.signals.finding import find
from leyden.server.control.keys import KeyKind

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
QUESTION = {"role": "user", "content": "What is 2 + 3?"}


def use_tool(answer: Any) -> list[dict[str, Any]]:
    """What an agent sends back: the answer as its SDK dumps it, and the tool's result."""
    message = answer.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": c.id, "content": str(sum(json.loads(c.function.arguments).values()))}
        for c in message.tool_calls
    ]
    return [message.model_dump(exclude_none=True), *results]


async def test_a_conversation_with_a_tool_keeps_its_tokens(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [call("add", '{"b":3,  "a": 2}') + END, "It is 5." + END, "You are welcome!" + END]
    messages: list[Any] = [{"role": "system", "content": "You can add."}, QUESTION]
    first = await client.chat.completions.create(model="any-name", messages=messages, tools=[ADD])
    assert first.model == "any-name"
    assert first.choices[0].finish_reason == "tool_calls"
    messages += use_tool(first)
    second = await client.chat.completions.create(model="any-name", messages=messages, tools=[ADD])
    assert second.choices[0].message.content == "It is 5."
    assert second.choices[0].finish_reason == "stop"
    messages += [{"role": "assistant", "content": "It is 5.\n"}, {"role": "user", "content": "Thanks"}]
    third = await client.chat.completions.create(model="any-name", messages=messages, tools=[ADD])
    assert third.choices[0].message.content == "You are welcome!"
    episode = await server.check(calls=3)
    assert [c.prompt_origin for c in episode.calls] == ["fresh", "continued", "continued"]
    assert server.tokenizer.decode(episode.calls[1].completion_ids) == "It is 5." + END
    assert [made.tools is None for made in episode.calls] == [False, True, True]  # kept once
    assert episode.tools(episode.calls[2]) == (ADD,)
    assert third.usage is not None
    assert third.usage.prompt_tokens == len(episode.prompt_ids(episode.calls[2]))


async def test_a_stream_says_what_the_whole_answer_says(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    text = "Grüße 👋, and \n\n white  space."
    server.lines = [text + END, call("add", '{"a": 1, "b": 2}') + call("add", '{"a": 3, "b": 4}') + END]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    said, finish, usage = "", None, None
    async for chunk in await client.chat.completions.create(model="m", messages=[QUESTION], **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert (said, finish) == (text, "stop")
    assert usage is not None
    async with client.chat.completions.stream(model="m", messages=[QUESTION], tools=[ADD]) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [json.loads(c.function.arguments) for c in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    episode = await server.check(calls=2)
    assert usage.completion_tokens == len(episode.calls[0].completion_ids)


async def test_arguments_are_streamed_and_a_call_that_turns_out_malformed_is_recorded_so(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    words = "many words " * 40
    server.lines = [
        call("add", f'{{"a": "{words}", "b": 2}}') + END,
        f'<tool_call>\n{{"name": "add", "arguments": {{"a": "{words}" oops}}}}\n</tool_call>' + END,
        "I see." + END,
    ]
    messages: list[Any] = [QUESTION]
    for complete in (True, False):
        asked: Any = {"model": "m", "messages": messages, "tools": [ADD], "stream": True}
        parts = [part async for part in await client.chat.completions.create(**asked)]
        deltas = [given for part in parts for choice in part.choices for given in choice.delta.tool_calls or ()]
        assert len(deltas) > 10
        assert [given.function.name for given in deltas if given.function.name] == ["add"]
        arguments = "".join(given.function.arguments or "" for given in deltas)
        assert parts[-1].choices[0].finish_reason == "tool_calls"
        made = {"id": deltas[0].id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        messages.append({"role": "tool", "tool_call_id": made["id"], "content": "5" if complete else "not JSON"})
    answer = await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
    assert answer.choices[0].message.content == "I see."
    episode = await server.check(calls=3)
    assert [c.prompt_origin for c in episode.calls[1:]] == [PromptOrigin.CONTINUED] * 2
    assert [c.response["tool_calls"][0].get("malformed") for c in episode.calls[:2]] == [None, "invalid_json"]
    assert {(s.call.id, str(s.kind)) for s in find(episode)} >= {
        (episode.calls[0].id, "bad_arguments"),
        (episode.calls[1].id, "malformed_call"),
    }


def test_the_synchronous_client_works_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with model_server(tmp_path) as server:
            key = await server.new_attempt()
            server.lines = ["Hello" + END]

            def talk() -> str | None:
                with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
                    return client.chat.completions.create(model="m", messages=[QUESTION]).choices[0].message.content

            assert await asyncio.to_thread(talk) == "Hello"
            await server.check(calls=1)

    asyncio.run(main())


async def test_branches_and_edited_histories_match_their_prefix(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = [f"Line {n}" + END for n in range(9)]

    async def say(*contents: str) -> str:
        roles = ("user", "assistant")
        messages: Any = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
        answer = await client.chat.completions.create(model="m", messages=messages)
        return answer.choices[0].message.content or ""

    first = await say("a")
    await say("a", first, "b")
    await say("a", first, "c")  # a branch
    await say("a", "never said", "b")  # an edited history
    await say("x")  # another agent
    calls = (await server.check(calls=5)).calls
    assert [c.prompt_origin for c in calls] == ["fresh", "continued", "continued", "rerendered", "fresh"]
    assert calls[1].parent == calls[2].parent == calls[0].id
    assert calls[3].origin_reason
    page = server.service.telemetry.render().decode()
    assert 'leyden_calls_total{prompt_origin="continued",status="ok"} 2.0' in page


async def test_several_choices_share_their_prompt(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["One" + END, "Two" + END, "Three" + END]
    answer = await client.chat.completions.create(model="m", messages=[QUESTION], n=3)
    assert [choice.message.content for choice in answer.choices] == ["One", "Two", "Three"]
    episode = await server.check(calls=3)
    assert len({episode.prompt_ids(c) for c in episode.calls}) == 1
    assert [len(c.prompt_ids) > 0 for c in episode.calls] == [True, False, False]
    assert len({request.sampling.seed for request in server.engine.requests}) == 3


@pytest.mark.parametrize("history", ["template", "exact"])
async def test_a_stop_string_cuts_the_text_and_not_the_tokens(server: ModelServer, history: str) -> None:
    key = await server.new_attempt("stop", history=history)
    server.lines = ["One STOPPED two" + END, "Again" + END]
    follow: Any = [QUESTION, {"role": "assistant", "content": "One "}, {"role": "user", "content": "Go on"}]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        answer = await client.chat.completions.create(model="m", messages=[QUESTION], stop=["STOP"])
        assert answer.choices[0].message.content == "One "
        assert answer.choices[0].finish_reason == "stop"
        await client.chat.completions.create(model="m", messages=follow)
    episode = await server.check(calls=2)
    assert "STOP" in server.tokenizer.decode(episode.calls[0].completion_ids)
    assert server.engine.cancelled == 1
    prompt = server.tokenizer.decode(episode.prompt_ids(episode.calls[1]))
    if history == "exact":  # all that was sampled, and an end to it
        assert (episode.calls[1].prompt_origin, "One STOP" in prompt) == (PromptOrigin.CONTINUED, True)
    else:  # what the agent was shown
        assert (episode.calls[1].prompt_origin, f"One {END}" in prompt) == (PromptOrigin.RERENDERED, True)
        assert "stop string" in episode.calls[1].origin_reason


@pytest.mark.parametrize("history", ["template", "exact"])
@pytest.mark.parametrize("between", ["so ", "\n"])
async def test_a_stop_string_after_a_tool_call_is_not_in_the_next_prompt(
    server: ModelServer, history: str, between: str
) -> None:
    key = await server.new_attempt("stop", history=history)
    made = call("look", '{"at": "Observation: none"}')
    server.lines = [f"{made}{between}Observation: 3{END}", f"Again{END}"]
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        answer = await client.chat.completions.create(
            model="m",
            messages=[QUESTION],
            tools=tools,
            stop=["Observation:"],
        )
        said = answer.choices[0].message
        assert (said.content or "", answer.choices[0].finish_reason) == (between.strip() and between, "tool_calls")
        result = {"role": "tool", "tool_call_id": (said.tool_calls or [])[0].id, "content": "4"}
        follow: Any = [QUESTION, said, result]
        await client.chat.completions.create(model="m", messages=follow, tools=tools)
    episode = await server.check(calls=2)
    prompt = server.tokenizer.decode(episode.prompt_ids(episode.calls[1]))
    if between == "\n":  # the answer ended with the call
        assert episode.calls[1].prompt_origin is PromptOrigin.CONTINUED and f"{made}{END}" in prompt
    elif history == "exact":
        assert episode.calls[1].prompt_origin is PromptOrigin.CONTINUED and "so Observation:" in prompt
    else:
        assert (episode.calls[1].prompt_origin, "so Observation:" in prompt) == (PromptOrigin.RERENDERED, False)
        assert "stop string" in episode.calls[1].origin_reason


@pytest.mark.parametrize("tool_calls", ["marked", "any"])
async def test_a_call_in_a_fenced_block_is_a_tool_call_where_the_run_says_so(
    server: ModelServer, tool_calls: str
) -> None:
    key = await server.new_attempt("fenced", tool_calls=tool_calls)
    said = '```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n```'
    server.lines = [said + END, "Five." + END]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        request: Any = {"model": "m", "tools": [ADD]}
        message = (await client.chat.completions.create(messages=[QUESTION], **request)).choices[0].message
        if tool_calls == "marked":
            assert (message.content, message.tool_calls) == (said, None)
            return
        assert message.tool_calls is not None
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
        await client.chat.completions.create(messages=[QUESTION, message.to_dict(), result], **request)
    first, second = (await server.check(calls=2)).calls
    assert second.prompt_origin is PromptOrigin.CONTINUED  # with the tokens that were sampled, fence and all
    assert server.tokenizer.decode(first.completion_ids) == said + END


async def test_an_answer_cut_by_length_is_closed_with_unsampled_tokens(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = ["A long story about sparks" + END, "Again" + END]
    answer = await client.chat.completions.create(model="m", messages=[QUESTION], max_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    said = answer.choices[0].message.content
    follow: Any = [QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on"}]
    await client.chat.completions.create(model="m", messages=follow)
    episode = await server.check(calls=2)
    assert len(episode.calls[0].completion_ids) == 3
    assert episode.calls[1].prompt_origin is PromptOrigin.CONTINUED


async def test_an_answer_cut_after_a_complete_tool_call_finishes_by_length(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    whole = call("add", '{"a": 1, "b": 2}')
    server.lines = [whole + call("add", '{"a": 3, "b": 4}') + END]
    room = len(server.tokenizer.text_ids(whole)) + 3
    request: Any = {"messages": [QUESTION], "tools": [ADD], "max_tokens": room}
    answer = await client.chat.completions.create(model="m", **request)
    first, cut = (made.function.arguments for made in answer.choices[0].message.tool_calls)
    assert json.loads(first) == {"a": 1, "b": 2} and '{"a": 3, "b": 4}'.startswith(cut)
    assert answer.choices[0].finish_reason == "length"
    assert (await server.check(calls=1)).calls[0].finish == "length"


async def test_training_samples_as_the_run_says_and_evaluation_as_the_caller_requests(server: ModelServer) -> None:
    for purpose in (Purpose.TRAIN, Purpose.EVAL):
        key = await server.new_attempt(f"s-{purpose}", purpose, sampling=Sampling(temperature=0.9, max_tokens=50))
        server.lines = ["Hi" + END]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
            await client.chat.completions.create(model="m", messages=[QUESTION], temperature=0.0, max_tokens=60)
        (made,) = (await server.check(calls=1)).calls
        if purpose is Purpose.TRAIN:
            assert (made.sampling.temperature, made.sampling.max_tokens) == (0.9, 50)
            assert made.sampling.seed is not None
        else:
            assert (made.sampling.temperature, made.sampling.max_tokens) == (0.0, 60)
        assert made.request["temperature"] == 0.0


async def test_logprobs_are_returned_when_requested(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["Hi there" + END]
    answer = await client.chat.completions.create(model="m", messages=[QUESTION], logprobs=True, top_logprobs=2)
    shown = answer.choices[0].logprobs
    assert shown is not None
    assert "".join(token.token for token in shown.content or ()) == "Hi there" + END


async def test_a_malformed_tool_call_is_shown_and_not_swallowed(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = ['Let me see. <tool_call>\n{"name": "add", "argum\n</tool_call>' + END]
    answer = await client.chat.completions.create(model="m", messages=[QUESTION], tools=[ADD])
    assert not answer.choices[0].message.tool_calls
    assert '"argum' in (answer.choices[0].message.content or "")


@pytest.mark.parametrize("named", [True, False])
async def test_a_required_tool_call_is_started_for_the_model(
    server: ModelServer, client: openai.AsyncOpenAI, named: bool
) -> None:
    server.lines = ['{"a": 2, "b": 3}}\n</tool_call>' + END if named else call("add", '{"a": 2, "b": 3}')[12:] + END]
    server.lines.append("Done" + END)
    choice: Any = {"type": "function", "function": {"name": "add"}} if named else "required"
    answer = await client.chat.completions.create(
        model="m",
        messages=[QUESTION],
        tools=[ADD],
        tool_choice=choice,
    )
    (made,) = answer.choices[0].message.tool_calls or ()
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 2, "b": 3})
    messages: Any = [QUESTION, *use_tool(answer)]
    await client.chat.completions.create(model="m", messages=messages, tools=[ADD])
    episode = await server.check(calls=2)
    assert [c.prompt_origin for c in episode.calls] == [PromptOrigin.FRESH, PromptOrigin.CONTINUED]
    forced = server.tokenizer.decode(
        episode.prompt_ids(episode.calls[0])[-1:] if not named else episode.calls[0].prompt_ids
    )
    assert forced.endswith('"arguments": ' if named else "\n")


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"temperature": 9}, "temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "regex"}}, "response_format"),
        ({"n": 0}, "n"),
        ({"functions": [{"description": "add"}]}, "functions[0]"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0]"),
    ],
)
async def test_what_cannot_be_served_is_a_400_that_names_the_parameter(
    client: openai.AsyncOpenAI, request_: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{"model": "m", "messages": [QUESTION], **request_})
    assert refused.value.param == param
    assert str(refused.value.body["message"]).startswith(f"{param}: ")  # many agents show nothing else


async def test_a_prompt_that_is_too_long_has_the_code_that_agents_look_for(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "1 " * 40_000}])
    assert refused.value.code == "context_length_exceeded"


async def test_keys_are_refused_in_the_dialect(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            await stranger.chat.completions.create(model="m", messages=[QUESTION])
    assert refused.value.code == "invalid_api_key"
    assert [model.id async for model in client.models.list()] == ["spark"]


async def test_an_engine_that_dies_ends_the_stream_with_an_error(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    alive = server.tokenizer.encode("This is going well, isn't it")
    server.engine.script = lambda _: [*alive, -1]
    with pytest.raises(openai.APIError, match="engine failed"):
        async for _ in await client.chat.completions.create(model="m", messages=[QUESTION], stream=True):
            pass
    (made,) = (await server.check(calls=1)).calls
    assert made.status is CallStatus.FAILED
    assert made.untrainable


async def test_a_call_whose_client_went_away_is_recorded_as_abandoned(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.engine.delay_s, server.engine.chunk_tokens = 0.02, 1
    for stream in (True, False):
        server.lines = ["word " * 500]
        asking = asyncio.create_task(
            client.chat.completions.create(model="m", messages=[QUESTION], stream=stream, max_tokens=400)
        )
        asked = 1 if stream else 2
        await eventually(lambda asked=asked: len(server.engine.requests) == asked)
        if stream:
            await (await asking).close()
        else:
            asking.cancel()
    assert server.service.gateway is not None
    index = server.service.gateway._attempts[server.attempt].index
    await eventually(lambda: index.recorded == 2)
    assert server.engine.cancelled == 2
    abandoned = (await server.check(calls=2)).calls
    assert {made.status for made in abandoned} == {CallStatus.ABANDONED}
    assert all(made.untrainable for made in abandoned)


async def test_budgets_end_a_looping_policy(server: ModelServer) -> None:
    key = await server.new_attempt("loop", max_calls=2)
    server.say = lambda _: "Again" + END
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        for _ in range(2):
            await client.chat.completions.create(model="m", messages=[QUESTION])
        with pytest.raises(openai.PermissionDeniedError, match="2 calls"):
            await client.chat.completions.create(model="m", messages=[QUESTION])


async def test_a_budget_of_tokens_holds_within_a_call_too(server: ModelServer) -> None:
    key = await server.new_attempt("tokens", max_tokens=5)
    server.say = lambda _: "One two three four five six" + END
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
        answer = await client.chat.completions.create(model="m", messages=[QUESTION])
        assert answer.usage is not None
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 5)
        with pytest.raises(openai.PermissionDeniedError, match="5 tokens"):
            await client.chat.completions.create(model="m", messages=[QUESTION])


async def test_calls_wait_while_the_engine_changes_its_weights(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    assert server.service.gateway is not None
    scheduler = server.service.gateway.models["spark"].scheduler
    server.say = lambda _: "Done" + END
    admin_key = server.service.keyring.create(KeyKind.ADMIN, 3600)[0]
    async with Remote(server.url, admin_key) as trainer:
        assert (await trainer.hold_calls(server.run, "spark")).waiting == 0
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=[QUESTION]))
        await eventually(lambda: scheduler.waiting == 1)
        assert not server.engine.requests
        assert (await trainer.hold_calls(server.run, "spark")).waiting == 1
        await trainer.publish_version(server.run, Version("spark", 7))
    assert (await asking).choices[0].message.content == "Done"
    (made,) = (await server.check(calls=1)).calls
    assert [run.number for run in made.versions] == [7]


async def test_a_conversation_continues_after_a_restart_of_the_server(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = ["One" + END, "Two" + END]
    await client.chat.completions.create(model="m", messages=[QUESTION])
    server.forget_attempts()
    follow: Any = [QUESTION, {"role": "assistant", "content": "One"}, {"role": "user", "content": "And?"}]
    await client.chat.completions.create(model="m", messages=follow)
    assert [c.prompt_origin for c in (await server.check(calls=2)).calls] == [
        PromptOrigin.FRESH,
        PromptOrigin.CONTINUED,
    ]


async def test_roles_come_from_a_header_or_the_path(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.say = lambda _: "Yes" + END
    await client.chat.completions.create(model="m", messages=[QUESTION], extra_headers={"x-leyden-role": "critic"})
    async with openai.AsyncOpenAI(base_url=f"{server.url}/role/writer/v1", api_key=server.key) as writer:
        await writer.chat.completions.create(model="m", messages=[QUESTION])
    assert [c.role for c in (await server.check(calls=2)).calls] == ["critic", "writer"]


async def test_retries_of_one_call_are_linked(server: ModelServer) -> None:
    alive = server.tokenizer.encode("Fine" + END)
    scripts = iter([[-1], alive])
    server.engine.script = lambda _: next(scripts)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=1) as client:
        await client.chat.completions.create(model="m", messages=[QUESTION])
    failed, fine = (await server.check(calls=2)).calls
    assert (failed.status, fine.status, fine.retry_of) == (CallStatus.FAILED, CallStatus.OK, failed.id)


async def test_a_request_again_after_a_failure_or_a_time_out_is_a_retry_whether_it_is_marked_or_not(
    server: ModelServer,
) -> None:
    fine = server.tokenizer.encode("Fine" + END)
    scripts = iter([[-1], fine, fine, fine, fine])
    server.engine.script = lambda _: next(scripts)
    options: Any = {"base_url": f"{server.url}/v1", "api_key": server.key, "max_retries": 0}
    request: Any = {"model": "m", "messages": [QUESTION]}
    async with openai.AsyncOpenAI(**options) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(**request)
        await client.chat.completions.create(**request)
        other: Any = {"model": "m", "messages": [{"role": "user", "content": "Another?"}]}
        server.engine.delay_s = 60.0
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(**other, timeout=0.5)
        await eventually(lambda: server.engine.cancelled == 1)
        server.engine.delay_s = 0.0
        await client.chat.completions.create(**other)
        await client.chat.completions.create(**request)  # the same again, after an answer: another sample
    failed, second, abandoned, fourth, again = (await server.check(calls=5)).calls
    assert (failed.status, abandoned.status) == (CallStatus.FAILED, CallStatus.ABANDONED)
    assert (second.retry_of, fourth.retry_of, again.retry_of) == (failed.id, abandoned.id, None)


async def test_calls_that_are_not_trained_on_are_counted_by_reason(server: ModelServer) -> None:
    server.say = lambda _: "Hi" + END
    biased = Sampling(top_p=0.9)
    for name, purpose, settings in (
        ("asked", Purpose.TRAIN, {"sampling": biased, "allow_biased_sampling": True}),
        ("fair", Purpose.TRAIN, {}),
        ("eval", Purpose.EVAL, {}),
    ):
        key = await server.new_attempt(name, purpose, **settings)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
            await client.chat.completions.create(model="m", messages=[QUESTION], temperature=0.0)
    assert "calls_untrained_total{" not in server.service.telemetry.render().decode()
    (made,) = (await server.check(calls=1)).calls
    assert made.untrainable == "greedy sampling"  # as an evaluation, it was the caller's to say
    key = await server.new_attempt("dies")
    server.engine.script = lambda _: [-1]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="m", messages=[QUESTION])
    assert 'leyden_calls_untrained_total{reason="failed"} 1.0' in server.service.telemetry.render().decode()


async def test_several_choices_are_streamed_side_by_side(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = ["One" + END, call("add", '{"a": 1, "b": 2}') + END, "Three" + END]
    async with client.chat.completions.stream(
        model="m",
        messages=[QUESTION],
        tools=[ADD],
        n=3,
        stream_options={"include_usage": True},
    ) as stream:
        final = await stream.get_final_completion()
    assert [choice.finish_reason for choice in final.choices] == ["stop", "tool_calls", "stop"]
    assert [choice.message.content or "" for choice in final.choices] == ["One", "", "Three"]
    episode = await server.check(calls=3)
    assert final.usage is not None
    assert final.usage.completion_tokens == sum(len(made.completion_ids) for made in episode.calls)


async def test_a_stream_that_is_held_is_kept_open_by_comments(
    server: ModelServer, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.server.http.streaming._KEEP_ALIVE_S", 0.02)
    assert server.service.gateway is not None
    scheduler = server.service.gateway.models["spark"].scheduler
    scheduler.hold()
    server.lines = ["Here" + END]
    body = {"model": "m", "messages": [QUESTION], "stream": True}
    headers = {"authorization": f"Bearer {server.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{server.url}/v1/chat/completions", json=body) as reply,
    ):
        comments = 0
        async for line in reply.content:
            comments += line.startswith(b":")
            if comments == 3:
                scheduler.resume()
        assert comments >= 3
    await server.check(calls=1)


async def test_models_are_listed_and_found(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["spark"]
    assert (await client.models.retrieve("gpt-any")).id == "gpt-any"  # every name is the policy
    key = await server.new_attempt("routes", routes={"Org/Model": "spark"})
    async with openai.AsyncOpenAI(base_url=f"{server.url}/role/critic/v1", api_key=key) as other:
        assert [model.id async for model in other.models.list(extra_query={"limit": 5})] == ["spark", "Org/Model"]
        assert (await other.models.retrieve("Org/Model")).id == "Org/Model"
        with pytest.raises(openai.NotFoundError) as missing:
            await other.models.retrieve("gpt-any")
    assert missing.value.code == "model_not_found"
