"""Models served elsewhere: here, by another Leyden server, through the same API."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import httpx
import openai
import pytest
from aiohttp import web
from modelserving import END, ModelServer, call, eventually, model_server
from yarl import URL

from leyden.api.wire import FinishRequest
from leyden.engine.protocol import ReplicasAddress, SocketAddress, VllmAddress
from leyden.engine.remote import describe_address
from leyden.outcomes import Ending, Outcome
from leyden.records import CallStatus
from leyden.server.control.engine_reports import report_engines
from leyden.server.gateway.errors import GatewayError
from leyden.server.gateway.upstream.client import UpstreamClient

LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
QUESTION: Any = {"role": "user", "content": "Well?"}


async def test_a_call_is_passed_on_and_recorded_without_tokens(tmp_path: Path) -> None:
    async with model_server(tmp_path / "far") as far, model_server(tmp_path / "near") as near:
        far.lines = [call("look", '{"at": "it"}') + END, "Seen." + END]
        await far.new_attempt()
        key = await near.new_attempt(routes={"gpt": "upstream", "own": "spark"})
        assert near.service.gateway is not None
        near.service.gateway.upstream = UpstreamClient(f"{far.url}/v1", far.key)
        async with openai.AsyncOpenAI(base_url=f"{near.url}/v1", api_key=key, max_retries=0) as client:
            first = await client.chat.completions.create(model="gpt", messages=[QUESTION], tools=[LOOK])
            (made,) = first.choices[0].message.tool_calls or ()
            messages: Any = [
                QUESTION,
                first.choices[0].message,
                {"role": "tool", "tool_call_id": made.id, "content": "x"},
            ]
            said = ""
            async for chunk in await client.chat.completions.create(
                model="gpt", messages=messages, tools=[LOOK], stream=True
            ):
                said += chunk.choices[0].delta.content or "" if chunk.choices else ""
            assert said == "Seen."
            near.lines = ["Mine" + END]
            own = await client.chat.completions.create(model="own", messages=[QUESTION])
            assert own.choices[0].message.content == "Mine"
            with pytest.raises(openai.NotFoundError, match="routes"):
                await client.chat.completions.create(model="other", messages=[QUESTION])
        episode = await near.check(calls=3)
        assert [c.untrainable for c in episode.calls] == ["no tokens", "no tokens", None]
        assert [c.policy for c in episode.calls] == ["upstream", "upstream", "spark"]
        assert [m["role"] for m in episode.messages(episode.calls[1])] == ["user", "assistant", "tool"]
        assert len(episode.calls[1].messages) < 3  # it holds only what it adds
        assert (await far.check(calls=2)).calls[1].prompt_origin == "continued"


async def test_an_upstream_that_is_unreachable_or_refuses_is_named_in_the_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with model_server(tmp_path) as near:
        key = await near.new_attempt(routes={"gpt": "upstream"})
        assert near.service.gateway is not None
        async with openai.AsyncOpenAI(base_url=f"{near.url}/v1", api_key=key, max_retries=0) as client:
            near.service.gateway.upstream = UpstreamClient("http://127.0.0.1:1/v1")
            with pytest.raises(openai.InternalServerError, match="cannot be reached"):
                await client.chat.completions.create(model="gpt", messages=[QUESTION])
            await near.service.gateway.close()
            near.service.gateway.upstream = UpstreamClient(f"{near.url}/v1", "a wrong key")
            with pytest.raises(openai.InternalServerError, match="not a key"):
                await client.chat.completions.create(model="gpt", messages=[QUESTION])
        assert [c.status for c in (await near.check(calls=2)).calls] == [CallStatus.FAILED] * 2
    logged = [record for record in caplog.records if record.name == "leyden.server"]
    assert [record.exc_info for record in logged] == [None, None]  # one line each, without a traceback
    assert "cannot be reached" in logged[0].getMessage()


async def test_the_engines_of_a_server_are_reported_with_their_calls_and_failures(tmp_path: Path) -> None:
    async with model_server(tmp_path) as near:
        key = await near.new_attempt(routes={"gpt": "upstream", "own": "spark"})
        assert near.service.gateway is not None
        near.service.gateway.upstream = UpstreamClient("http://someone:secret@127.0.0.1:1/v1")
        near.lines = ["Mine" + END]
        async with openai.AsyncOpenAI(base_url=f"{near.url}/v1", api_key=key, max_retries=0) as client:
            own = await client.chat.completions.create(model="own", messages=[QUESTION])
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="gpt", messages=[QUESTION])
        served, upstream = (await report_engines(near.service)).engines
        assert own.usage is not None
        assert (served.calls, served.failed, served.tokens) == (1, 0, own.usage.completion_tokens)
        assert (served.policy, served.location, served.running) == ("spark", "embedded", 0)
        assert (upstream.calls, upstream.failed, upstream.slots) == (1, 1, None)
        assert (upstream.policy, upstream.location) == ("upstream", "http://127.0.0.1:1/v1")  # without the password


@pytest.mark.parametrize(
    ("location", "shown"), [("/tmp/socket", "vLLM"), ("http://gpu:8000", "vLLM at http://gpu:8000")]
)
def test_an_engine_by_url_is_shown_with_its_url(location: str, shown: str) -> None:
    assert describe_address(VllmAddress(location, 10, 10, 10)) == shown
    embedded = SocketAddress(10, 10, 10)
    assert describe_address(embedded) == describe_address(ReplicasAddress((embedded,))) == "embedded"
    assert describe_address(ReplicasAddress((embedded, embedded))) == "2 x embedded"


@pytest.fixture
async def far(tmp_path: Path) -> AsyncIterator[ModelServer]:
    async with model_server(tmp_path / "far") as running:
        await running.new_attempt()
        yield running


@pytest.fixture
async def near(tmp_path: Path, far: ModelServer) -> AsyncIterator[ModelServer]:
    """A server that serves no model of its own."""
    async with model_server(tmp_path / "near") as running:
        await running.new_attempt()
        gateway = running.service.gateway
        assert gateway is not None
        gateway.models, gateway.upstream = {}, UpstreamClient(f"{far.url}/v1", far.key)
        yield running


@asynccontextmanager
async def openai_at(server: ModelServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client:
        yield client


@asynccontextmanager
async def anthropic_at(server: ModelServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0) as client:
        yield client


async def test_a_stream_is_passed_back_in_both_dialects(far: ModelServer, near: ModelServer) -> None:
    thought = "<think>\nHm.\n</think>\n\nWait: " + call("look", '{"at": [1,  2]}') + call("look", "{}") + END
    far.lines = [thought, thought]
    async with openai_at(near) as client:
        request: Any = {
            "model": "gpt",
            "messages": [QUESTION],
            "tools": [LOOK],
            "stream_options": {"include_usage": True},
        }
        async with client.chat.completions.stream(**request) as stream:
            async for event in stream:
                if event.type == "chunk" and any(choice.finish_reason for choice in event.chunk.choices):
                    assert len((await near.episode()).calls) == 1  # it is in the record before its end is sent
            answer = await stream.get_final_completion()
        message = answer.choices[0].message
        assert message.content == "Wait: "
        assert [made.function.arguments for made in message.tool_calls or ()] == ['{"at": [1,  2]}', "{}"]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage is not None and answer.usage.completion_tokens == len(far.tokenizer.encode(thought))
    async with anthropic_at(near) as client:
        tool: Any = {"name": "look", "input_schema": {"type": "object"}}
        asked: Any = {"messages": [QUESTION], "tools": [tool], "thinking": {"type": "adaptive"}}
        async with client.messages.stream(model="m", max_tokens=99, **asked) as stream:
            said = await stream.get_final_message()
        assert [block.type for block in said.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert said.stop_reason == "tool_use"
    first, second = (await near.check(calls=2)).calls
    assert (first.status, first.untrainable, first.response["reasoning_content"]) == (CallStatus.OK, "no tokens", "Hm.")
    for made in (first.response, second.response):
        assert [c["function"]["arguments"] for c in made["tool_calls"]] == ['{"at": [1,  2]}', "{}"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_responses_are_passed_on_stored_and_continued_in_any_dialect(
    far: ModelServer, near: ModelServer, stream: bool
) -> None:
    thought = "<think>\nHm.\n</think>\n\nWait: "
    far.lines = [
        thought + call("look", '{"at": 1}') + call("look", "{}") + END,
        "Seen." + END,
        "Yes." + END,
        "Bye." + END,
    ]
    tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
    request: Any = {"model": "gpt", "tools": [tool], "parallel_tool_calls": False}

    async def respond(**more: Any) -> Any:
        if not stream:
            return await client.responses.create(**request, **more)
        async with client.responses.stream(**request, **more) as events:
            return await events.get_final_response()

    async with openai_at(near) as client:
        first = await respond(input="Well?", instructions="Look.")
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        assert first.usage.output_tokens_details.reasoning_tokens > 0
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "x"}
        second = await respond(input=[result], previous_response_id=first.id, instructions="Look.")
        assert second.output_text == "Seen."
        messages: Any = [{"role": "system", "content": "Look."}, QUESTION]
        function = {"name": "look", "arguments": first.output[-1].arguments}
        made = {"id": first.output[-1].call_id, "type": "function", "function": function}
        messages += [{"role": "assistant", "content": "Wait: ", "tool_calls": [made]}]
        messages += [{"role": "tool", "tool_call_id": made["id"], "content": "x"}]
        messages += [{"role": "assistant", "content": "Seen."}, {"role": "user", "content": "Sure?"}]
        chat = await client.chat.completions.create(model="gpt", messages=messages, tools=[LOOK])
        assert chat.choices[0].message.content == "Yes."
    async with anthropic_at(near) as other:
        use = {"type": "tool_use", "id": made["id"], "name": "look", "input": {"at": 1}}
        said: Any = [
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": [{"type": "text", "text": "Wait: "}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": made["id"], "content": "x"}]},
            {"role": "assistant", "content": "Seen."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Bye!"},
        ]
        looking: Any = {"name": "look", "input_schema": {"type": "object"}}
        request = {"model": "gpt", "max_tokens": 99, "system": "Look.", "messages": said, "tools": [looking]}
        last = await other.messages.create(**request)
        assert [block.text for block in last.content if block.type == "text"] == ["Bye."]
    episode = await far.check(calls=4)
    assert [made.prompt_origin for made in episode.calls] == ["fresh", *["continued"] * 3]
    assert len(episode.calls[0].response["tool_calls"]) == 1
    assert [made.policy for made in (await near.check(calls=4)).calls] == ["upstream"] * 4


async def test_choices_and_logprobs_are_passed_back_streamed_or_not(far: ModelServer, near: ModelServer) -> None:
    far.lines = ["One" + END, "Two" + END] * 2
    async with openai_at(near) as client:
        request: Any = {"model": "gpt", "messages": [QUESTION], "n": 2, "logprobs": True, "top_logprobs": 1}
        whole = await client.chat.completions.create(**request)
        async with client.chat.completions.stream(**request) as stream:
            streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        assert [choice.message.content for choice in answer.choices] == ["One", "Two"]
        for choice, text in zip(answer.choices, ("One", "Two"), strict=True):
            assert choice.logprobs is not None
            assert "".join(token.token for token in choice.logprobs.content or ()) == text + END
    assert [made.choice for made in (await near.check(calls=4)).calls] == [0, 1, 0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_texts_are_passed_on_with_the_logprobs_of_their_prompts(
    far: ModelServer, near: ModelServer, stream: bool
) -> None:
    far.say = lambda prompt: f" after {prompt}" + END

    async def complete(client: openai.AsyncOpenAI, **options: Any) -> list[tuple[str, list[str], list[Any], list[int]]]:
        request: Any = {"model": "gpt", "prompt": ["One", "«Zwei»"], "stream": stream, **options}
        answer: Any = await client.completions.create(**request)
        found: list[Any] = [("", [], [], []) for _ in range(2 * options.get("n", 1))]
        for choice in [one async for chunk in answer for one in chunk.choices] if stream else answer.choices:
            text, *known = found[choice.index]
            new = choice.logprobs
            lists = (new.tokens, new.token_logprobs, new.text_offset) if new else ([], [], [])
            joined = [before + (more or []) for before, more in zip(known, lists, strict=True)]
            found[choice.index] = (text + choice.text, *joined)
        return found

    async with openai_at(near) as client, openai_at(far) as direct:
        assert [one[0] for one in await complete(client, n=2)] == [" after One"] * 2 + [" after «Zwei»"] * 2
        for options in ({"echo": True}, {"logprobs": 1}, {"echo": True, "logprobs": 2, "max_tokens": 0}):
            assert await complete(client, **options) == await complete(direct, **options)
        ((text, tokens, logprobs, offsets), _) = await complete(client, echo=True, logprobs=1, max_tokens=1)
        assert text.startswith("One") and text == "".join(tokens)
        assert (logprobs[0], offsets[0]) == (None, 0)
    calls = (await near.episode()).calls
    assert {(made.policy, made.status, made.untrainable) for made in calls} == {
        ("upstream", CallStatus.OK, "no tokens")
    }
    assert near.engine.requests == []


async def test_a_format_is_requested_of_the_upstream_too(far: ModelServer, near: ModelServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    far.lines = ['{"a": 1}' + END] * 2
    async with openai_at(near) as client:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        await client.chat.completions.create(model="m", messages=[QUESTION], response_format=wanted)
    async with anthropic_at(near) as client:
        asked: Any = {"format": {"type": "json_schema", "schema": schema}}
        await client.messages.create(model="m", max_tokens=99, messages=[QUESTION], output_config=asked)
    assert [made.request["response_format"]["json_schema"]["schema"] for made in (await far.episode()).calls] == [
        schema
    ] * 2
    assert [made.allowed for made in (await near.check(calls=2)).calls] == [None, None]


async def test_an_upstream_that_dies_ends_the_stream_with_an_error(far: ModelServer, near: ModelServer) -> None:
    alive = far.tokenizer.encode("This is going well, isn't it")
    far.engine.script = lambda _: [*alive, -1]
    async with openai_at(near) as client:
        with pytest.raises(openai.APIError, match=r"upstream.*engine failed"):
            async for _ in await client.chat.completions.create(model="m", messages=[QUESTION], stream=True):
                pass
    async with anthropic_at(near) as client:
        with pytest.raises(anthropic.APIStatusError, match=r"upstream.*engine failed"):
            async with client.messages.stream(model="m", max_tokens=99, messages=[QUESTION]) as stream:
                await stream.get_final_message()
    failed = (await near.check(calls=2)).calls
    assert [made.status for made in failed] == [CallStatus.FAILED] * 2
    assert all(made.response["content"].startswith("This is going") for made in failed)


@pytest.mark.parametrize("cut", [False, True])
async def test_a_stream_that_just_stops_is_a_failure_too(near: ModelServer, cut: bool) -> None:
    async def stop_short(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        await reply.write(b': hello\r\n\r\ndata: {"choices": [{"index": 0,\r\ndata: "delta": ')
        await reply.write(b'{"content": "So"}}]}\r\n\r\n')
        if cut and request.transport is not None:
            request.transport.close()
        return reply

    said = ""
    async with service({"/v1/chat/completions": stop_short}) as url, openai_at(near) as client:
        assert near.service.gateway is not None
        near.service.gateway.upstream = UpstreamClient(f"{url}/v1")
        with pytest.raises(openai.APIError, match="closed the"):
            async for chunk in await client.chat.completions.create(model="m", messages=[QUESTION], stream=True):
                said += chunk.choices[0].delta.content or ""
    assert cut or said == "So"  # a connection that breaks takes with it what nobody had read yet
    assert (await near.check(calls=1)).calls[0].status is CallStatus.FAILED


@pytest.mark.parametrize("stream", [True, False])
async def test_a_caller_who_goes_away_closes_the_request_upstream(
    far: ModelServer, near: ModelServer, stream: bool
) -> None:
    far.engine.delay_s, far.engine.chunk_tokens = 0.02, 1
    far.lines = ["word " * 500]
    body = {"model": "m", "messages": [QUESTION], "stream": stream, "max_tokens": 400}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {near.key}"}) as session:
        if stream:
            async with session.post(f"{near.url}/v1/chat/completions", json=body) as reply:
                async for line in reply.content:
                    if b"word" in line:  # long before the last token is drawn
                        break
                reply.close()
        else:
            with pytest.raises(TimeoutError):
                timeout = aiohttp.ClientTimeout(total=2.0)  # of 8 s
                await session.post(f"{near.url}/v1/chat/completions", json=body, timeout=timeout)
    await eventually(lambda: far.engine.cancelled == 1)
    assert near.service.gateway is not None
    index = near.service.gateway._attempts[near.attempt].index
    await eventually(lambda: index.recorded == 1)
    assert (await near.check(calls=1)).calls[0].status is CallStatus.ABANDONED


async def test_a_refusal_comes_before_the_stream_begins(far: ModelServer, near: ModelServer) -> None:
    far.engine.context_length = 4
    async with openai_at(near) as client:
        with pytest.raises(openai.BadRequestError, match=r"upstream.*tokens"):
            await client.chat.completions.create(model="m", messages=[QUESTION], stream=True)

    async def busy(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"retry-after": "7"})

    async with service({"/v1/chat/completions": busy}) as url, openai_at(near) as client:
        assert near.service.gateway is not None
        near.service.gateway.upstream = UpstreamClient(f"{url}/v1")
        with pytest.raises(openai.RateLimitError, match="slow down") as refused:
            await client.chat.completions.create(model="m", messages=[QUESTION], stream=True)
        assert refused.value.response.headers["retry-after"] == "7"


@pytest.mark.parametrize("key", ["the-key", "Basic dXNlcjprZXk="])
async def test_a_refusal_that_repeats_the_upstreams_key_is_passed_on_without_it(near: ModelServer, key: str) -> None:
    async def echo(request: web.Request) -> web.Response:
        message = f"wrong key: {request.headers['authorization']}"
        as_text = request.path.startswith("/text")
        return (
            web.Response(text=message, status=401)
            if as_text
            else web.json_response({"error": {"message": message}}, status=401)
        )

    assert near.service.gateway is not None
    async with (
        service({"/v1/chat/completions": echo, "/text/chat/completions": echo}) as url,
        openai_at(near) as client,
    ):
        for base in ("v1", "text"):
            near.service.gateway.upstream = UpstreamClient(f"{url}/{base}", key)
            with pytest.raises(openai.InternalServerError, match=r"wrong key: \w+ \*\*\*") as refused:
                await client.chat.completions.create(model="m", messages=[QUESTION])
            assert key.removeprefix("Basic ") not in str(refused.value)
            await near.service.gateway.upstream.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_byte_that_is_not_utf8_does_not_lose_the_call(near: ModelServer, stream: bool) -> None:
    async def latin(request: web.Request) -> web.Response:
        kind = "delta" if stream else "message"
        answer = b'{"choices": [{"index": 0, "finish_reason": "stop", "%s": {"content": "caf\xe9"}}]}' % kind.encode()
        return web.Response(body=b"data: " + answer + b"\n\ndata: [DONE]\n\n" if stream else answer)

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(body=b'{"error": {"message": "tr\xe8s mal"}}', status=400)

    assert near.service.gateway is not None
    async with service({"/v1/chat/completions": latin, "/bad/chat/completions": refuse}) as url:
        near.service.gateway.upstream = UpstreamClient(f"{url}/v1")
        said = ""
        async with openai_at(near) as client:
            if stream:
                async for chunk in await client.chat.completions.create(model="m", messages=[QUESTION], stream=True):
                    said += chunk.choices[0].delta.content or "" if chunk.choices else ""
            else:
                answer = await client.chat.completions.create(model="m", messages=[QUESTION])
                said = answer.choices[0].message.content or ""
            await near.service.gateway.close()
            near.service.gateway.upstream = UpstreamClient(f"{url}/bad")
            with pytest.raises(openai.BadRequestError, match="tr\N{REPLACEMENT CHARACTER}s mal"):
                await client.chat.completions.create(model="m", messages=[QUESTION], stream=stream)
    assert said == "caf\N{REPLACEMENT CHARACTER}"
    first, second = (await near.check(calls=2)).calls
    assert (first.status, first.response["content"], second.status) == (CallStatus.OK, said, CallStatus.FAILED)


async def test_calls_share_connections_and_no_cookies(near: ModelServer) -> None:
    ports, cookies = set[int](), list[str | None]()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername")[1])
        cookies.append(request.headers.get("cookie"))
        reply = web.json_response({"choices": [{"message": {"content": "Yes."}}]})
        reply.set_cookie("rollout", "one")
        return reply

    assert near.service.gateway is not None
    async with service({"/v1/chat/completions": answer}) as url, openai_at(near) as client:
        near.service.gateway.upstream = UpstreamClient(f"{url}/v1")
        for _ in range(3):
            await client.chat.completions.create(model="m", messages=[QUESTION])
        assert len(ports) == 1
        assert cookies == [None] * 3


async def test_an_upstream_that_says_nothing_names_the_time_limit_to_change() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with service({"/v1/models": never}) as url:
        upstream = UpstreamClient(f"{url}/v1", timeout_s=0.2)
        with pytest.raises(GatewayError, match=r"sent nothing for 0.2 s \(upstream.timeout_s"):
            await upstream.models()
        await upstream.close()


async def test_any_number_of_requests_are_sent_at_once_until_the_client_is_closed() -> None:
    arrived, all_arrived = 0, asyncio.Event()

    async def models(request: web.Request) -> web.Response:
        nonlocal arrived
        arrived += 1
        if arrived == 120:
            all_arrived.set()
        await all_arrived.wait()
        return web.json_response({"data": [{"id": "m"}]})

    async with service({"/v1/models": models}) as url:
        upstream = UpstreamClient(f"{url}/v1")
        async with asyncio.timeout(120):
            assert await asyncio.gather(*(upstream.models() for _ in range(120))) == [["m"]] * 120
        await upstream.close()
        with pytest.raises(RuntimeError, match="closed"):
            await upstream.models()


async def test_its_models_are_listed_where_there_are_no_others(near: ModelServer) -> None:
    async with openai_at(near) as client:
        assert [model.id async for model in client.models.list()] == ["spark"]
        assert (await client.models.retrieve("spark")).id == "spark"


# Other paths


@asynccontextmanager
async def service(routes: dict[str, Any]) -> AsyncIterator[str]:
    """Another kind of service, on a port of its own."""
    app = web.Application()
    app.add_routes([web.route("*", path, handler) for path, handler in routes.items()])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_other_models_are_called_at_the_upstream_with_its_own_key(near: ModelServer) -> None:
    seen: list[web.Request] = []

    async def embed(request: web.Request) -> web.Response:
        seen.append(request)
        asked = await request.json()
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, len(asked["input"])]}]
        return web.json_response(
            {"object": "list", "model": "e", "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}}
        )

    async def speak(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"content-type": "audio/mpeg"})
        await reply.prepare(request)
        for _ in range(3):
            await reply.write(b"\xff\xfb" * 1000)
        return reply

    async def hear(request: web.Request) -> web.Response:
        form = await request.post()
        return web.json_response({"text": form["file"].file.read().decode()})

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too rude"}}, status=400)

    routes = {
        "/v1/embeddings": embed,
        "/v1/audio/speech": speak,
        "/v1/audio/transcriptions": hear,
        "/v1/moderations": refuse,
    }
    async with service(routes) as url, openai_at(near) as client:
        assert near.service.gateway is not None
        near.service.gateway.upstream = UpstreamClient(f"{url}/v1", "the upstream's key")
        answer = await client.embeddings.create(
            model="e", input="four", encoding_format="float", extra_headers={"cookie": "mine"}, extra_query={"x": "y"}
        )
        assert answer.data[0].embedding == [0.5, 4]
        assert seen[0].headers["authorization"] == "Bearer the upstream's key"
        assert near.key not in str(seen[0].headers) and "cookie" not in seen[0].headers
        assert seen[0].query == {"x": "y"}
        speech = await client.audio.speech.create(model="s", voice="v", input="hi")
        assert speech.response.headers["content-type"] == "audio/mpeg"
        assert await speech.aread() == b"\xff\xfb" * 3000
        assert (await client.audio.transcriptions.create(model="t", file=b"heard")).text == "heard"
        with pytest.raises(openai.BadRequestError, match="too rude"):
            await client.moderations.create(model="m", input="x")
    await near.check(calls=0)


async def test_calls_of_other_kinds_of_models_count_towards_the_limit_of_calls(near: ModelServer) -> None:
    async def judge(request: web.Request) -> web.Response:
        return web.json_response({"id": "1", "model": "m", "results": []})

    await near.new_attempt("limited", max_calls=2)
    async with service({"/v1/moderations": judge}) as url, openai_at(near) as client:
        assert near.service.gateway is not None
        near.service.gateway.upstream = UpstreamClient(f"{url}/v1")
        for _ in range(2):
            await client.moderations.create(model="m", input="x")
        with pytest.raises(openai.PermissionDeniedError, match="2 of its 2 calls"):
            await client.moderations.create(model="m", input="x")


@pytest.mark.parametrize(
    ("routes", "policies"),
    [({}, ["spark"]), ({"own": "spark"}, []), ({"up*": "upstream"}, ["upstream"])],
)
async def test_an_agent_reaches_the_upstream_only_where_a_route_says_so(
    tmp_path: Path, far: ModelServer, routes: dict[str, str], policies: list[str]
) -> None:
    async with model_server(tmp_path / "serving") as serving:
        await serving.new_attempt(routes=routes)
        assert serving.service.gateway is not None
        serving.service.gateway.upstream = UpstreamClient(f"{far.url}/v1", far.key)
        serving.lines, far.lines = ["Mine" + END], ["Far" + END]
        refused = contextlib.nullcontext() if policies else pytest.raises(openai.NotFoundError, match="routes")
        async with openai_at(serving) as client:
            with refused:
                await client.chat.completions.create(model="upstream", messages=[QUESTION])
        assert [made.policy for made in (await serving.episode()).calls] == policies


@pytest.mark.parametrize("breaks", ["before the answer", "within the answer"])
async def test_a_failure_of_another_model_is_not_the_agents_until_a_later_call_is_answered(
    near: ModelServer, breaks: str
) -> None:
    broken = True

    async def speak(request: web.Request) -> web.StreamResponse:
        if broken and breaks == "before the answer":
            return web.json_response({"error": {"message": "no memory"}}, status=500)
        reply = web.StreamResponse(headers={"content-type": "audio/mpeg"})
        await reply.prepare(request)
        await reply.write(b"some")
        if broken:
            assert request.transport is not None
            request.transport.abort()
        return reply

    async def end_as_reported() -> Outcome:
        report = FinishRequest(Outcome(Ending.AGENT_ERROR, "exit status 1"))
        return (await gateway.end_attempt(near.run, near.attempt, report)).outcome

    gateway = near.service.gateway
    assert gateway is not None
    async with service({"/v1/audio/speech": speak}) as url, openai_at(near) as client:
        gateway.upstream = UpstreamClient(f"{url}/v1")
        with pytest.raises((openai.APIError, httpx.TransportError)):
            await (await client.audio.speech.create(model="s", voice="v", input="hi")).aread()
        charged = await end_as_reported()
        assert charged.ending is Ending.ENGINE_ERROR
        assert charged.message.startswith(f"the upstream at {url}/v1 ") and charged.message.endswith("\nexit status 1")
        broken = False
        await (await client.audio.speech.create(model="s", voice="v", input="hi")).aread()
        assert (await end_as_reported()).ending is Ending.AGENT_ERROR


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("POST", "/v1/embeddings", 404, "--upstream"),
        ("POST", "/role/critic/v1/embeddings", 404, "--upstream"),
        ("POST", "/v1/threads", 404, "/v1/chat/completions"),
        ("POST", "/v1/load_lora_adapter", 404, "not served"),
        ("POST", "/v1/chat", 404, "not served"),
        ("GET", "/v1/files", 404, "not served"),
        ("DELETE", "/v1/files/x", 404, "not served"),
        ("POST", "/v1/audio/%2e%2e/files", 400, "path"),
        ("POST", "/v1/audio/../../admin", 400, "path"),
    ],
)
async def test_paths_that_are_not_served_get_an_error_that_says_so(
    near: ModelServer, method: str, path: str, status: int, says: str
) -> None:
    assert near.service.gateway is not None
    near.service.gateway.upstream = None
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {near.key}"}) as session:
        async with session.request(method, URL(near.url + path, encoded=True), json={}) as reply:
            answer = await reply.json()
        assert (reply.status, says in answer["error"]["message"]) == (status, True), answer
        async with session.request(method, URL(near.url + path, encoded=True), headers={"authorization": ""}) as reply:
            assert reply.status == 401
