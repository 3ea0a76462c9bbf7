"""The OpenAI completions dialect, through the official client, unmodified."""

import threading
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from modelserving import END, ModelServer, model_server
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from leyden.engine.torch.engine import TorchEngine
from leyden.records import CallStatus, PromptOrigin
from leyden.server.gateway.dialects.completions import CompletionsWriter
from leyden.server.gateway.prompts.prompt import CUT_BY_STOP
from leyden.server.gateway.upstream.client import UpstreamClient


async def test_a_text_that_goes_on_keeps_its_tokens(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [" one,  two, «drei» 🎉" + END, " four." + END, " five" + END]
    text = "Count:"
    for new in ("\nGo on:", "<|im_end|>\nMore:", ""):
        completion = await client.completions.create(model="m", prompt=text, max_tokens=50)
        (choice,) = completion.choices
        assert (completion.object, choice.finish_reason) == ("text_completion", "stop")
        text += choice.text + new
    assert text == "Count: one,  two, «drei» 🎉\nGo on: four.<|im_end|>\nMore: five"
    episode = await server.episode()
    first, second, third = episode.calls
    assert [made.prompt_origin for made in episode.calls] == [PromptOrigin.FRESH, *[PromptOrigin.CONTINUED] * 2]
    kept = episode.prompt_ids(first) + first.completion_ids[:-1]  # the text does not have the end token
    assert episode.prompt_ids(second)[: len(kept)] == kept
    whole = episode.prompt_ids(second) + second.completion_ids  # this one does
    assert episode.prompt_ids(third)[: len(whole)] == whole
    assert server.tokenizer.decode(episode.prompt_ids(third)) == text.removesuffix(" five")
    assert [len(made.messages) for made in episode.calls] == [1, 1, 1]  # stored as differences
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(episode.prompt_ids(third))


async def test_the_text_after_a_stop_string_keeps_the_tokens_before_it(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = ["I look it up.\nResult: 7 is" + END, "It is 7." + END, "Other" + END]
    first = await client.completions.create(model="m", prompt="Q: 3 + 4?\n", stop=["Result:"], max_tokens=50)
    text = "Q: 3 + 4?\n" + first.choices[0].text
    assert text == "Q: 3 + 4?\nI look it up.\n"
    await client.completions.create(model="m", prompt=text + "Result: 7\n", max_tokens=50)
    await client.completions.create(model="m", prompt=text + "Something else.", max_tokens=50)
    episode = await server.episode()
    made, agreed, differs = episode.calls
    assert made.completion_ids == episode.prompt_ids(agreed)[len(made.prompt_ids) :][: len(made.completion_ids)]
    assert agreed.prompt_origin is PromptOrigin.CONTINUED
    assert differs.prompt_origin is PromptOrigin.CONTINUED or differs.origin_reason == CUT_BY_STOP
    assert server.tokenizer.decode(episode.prompt_ids(differs)) == text + "Something else."


async def test_tokens_are_continued_as_they_are(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [" two" + END, " four" + END, " six" + END]
    ids = server.tokenizer.encode("One,")
    wanted: Any = {"model": "m", "max_tokens": 20, "extra_body": {"return_token_ids": True}}
    first = await client.completions.create(prompt=ids, **wanted)
    sampled = first.choices[0].token_ids
    assert server.tokenizer.decode(sampled) == " two" + END
    assert first.choices[0].text == " two"
    with_end = [*ids, *sampled, *server.tokenizer.encode(" three,")]
    second = await client.completions.create(prompt=with_end, **wanted)
    without_end = [*with_end, *second.choices[0].token_ids[:-1], *server.tokenizer.encode(" five,")]
    await client.completions.create(prompt=without_end, **wanted)
    episode = await server.episode()
    assert [made.prompt_origin for made in episode.calls] == [PromptOrigin.FRESH, *[PromptOrigin.CONTINUED] * 2]
    assert [list(episode.prompt_ids(made)) for made in episode.calls] == [ids, with_end, without_end]
    assert episode.calls[2].kept_ids == len(with_end) + len(episode.calls[1].completion_ids) - 1


async def test_a_restarted_server_continues_texts(tmp_path: Path) -> None:
    async with model_server(tmp_path) as server:
        key = await server.new_attempt()
        run, attempt = server.run, server.attempt
        server.lines = [" two" + END]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
            await client.completions.create(model="m", prompt="One,")
    async with model_server(tmp_path) as server:
        server.run, server.attempt, server.lines = run, attempt, [" four" + END]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
            await client.completions.create(model="m", prompt="One, two three")
        assert (await server.episode()).calls[1].prompt_origin is PromptOrigin.CONTINUED


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_choices_are_told_apart(
    server: ModelServer, client: openai.AsyncOpenAI, stream: bool
) -> None:
    server.say = lambda prompt: f" after {prompt}" + END
    options: Any = {"model": "m", "prompt": ["a", "b"], "n": 2, "echo": True, "max_tokens": 30}
    texts = [""] * 4
    if stream:
        usage = None
        options |= {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.completions.create(**options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        whole = await client.completions.create(**options)
        usage = whole.usage
        for choice in whole.choices:
            texts[choice.index] = choice.text
    assert texts == ["a after a", "a after a", "b after b", "b after b"]
    episode = await server.episode()
    assert len(episode.calls) == 4
    assert usage is not None
    assert usage.prompt_tokens == sum(len(episode.prompt_ids(made)) for made in episode.calls if not made.choice)
    assert usage.completion_tokens == sum(len(made.completion_ids) for made in episode.calls)


async def test_logprobs_are_those_of_the_record(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [" two three" + END] * 2
    whole = await client.completions.create(model="m", prompt="One,", logprobs=2)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    (made,) = (await server.episode()).calls
    assert logprobs.token_logprobs == pytest.approx(made.logprobs)
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == " two three" + END
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:at])) for at in range(len(logprobs.tokens))]
    streamed: list[str] = []
    async for chunk in await client.completions.create(model="m", prompt="One,", logprobs=2, stream=True):
        for choice in chunk.choices:
            streamed += (choice.logprobs and choice.logprobs.tokens) or ()
    assert streamed == logprobs.tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_the_logprobs_of_a_prompt_are_echoed(
    server: ModelServer, client: openai.AsyncOpenAI, stream: bool, max_tokens: int
) -> None:
    server.lines = [" two" + END] * 2
    text = "«Drei» 🎉 one,"
    prompts = [server.tokenizer.encode(text), server.tokenizer.encode("b")]
    choices = await echoed(client, stream, prompt=prompts, logprobs=1, max_tokens=max_tokens)
    for ids, given, (written, finish, logprobs) in zip(prompts, (text, "b"), choices, strict=True):
        sampled = server.tokenizer.encode(" two")[:max_tokens]
        assert (written, finish) == (given + server.tokenizer.decode(sampled), "length")
        assert logprobs["tokens"] == [server.tokenizer.decode([id]) for id in (*ids, *sampled)]
        assert logprobs["token_logprobs"] == [None, *[0.0] * (len(ids) - 1 + len(sampled))]  # the script is certain
        expected = [{token: 0.0} for token in logprobs["tokens"]]
        assert logprobs["top_logprobs"] == [None, *expected[1:]]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert written[offset:].startswith(token.rstrip("\ufffd"))
        assert logprobs["text_offset"][len(ids) :] == [len(given)] * len(sampled)
    calls = (await server.episode()).calls
    assert [len(made.completion_ids) for made in calls] == [max_tokens] * 2
    assert {made.untrainable for made in calls} == {None if max_tokens else "no tokens"}
    assert {made.status for made in calls} == {CallStatus.OK}


async def test_the_logprobs_of_many_prompts_are_written_beside_other_calls(
    server: ModelServer, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def noted(writer: CompletionsWriter, events: Any) -> bytes:
        threads.append(threading.current_thread())
        return whole(writer, events)

    whole = CompletionsWriter.whole
    monkeypatch.setattr(CompletionsWriter, "whole", noted)
    await client.completions.create(model="m", prompt=["a b", "c d"], echo=True, logprobs=1, max_tokens=0)
    (thread,) = threads
    assert thread is not threading.main_thread()


async def echoed(client: openai.AsyncOpenAI, stream: bool, **options: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Return text, finish reason and logprobs of each choice of an echoed completion."""
    request: Any = {"model": "m", "echo": True, "stream": stream, **options}
    answer: Any = await client.completions.create(**request)
    found: dict[int, tuple[str, str, dict[str, Any]]] = {}
    for choice in [one async for chunk in answer for one in chunk.choices] if stream else answer.choices:
        text, finish, known = found.get(choice.index, ("", "", {}))
        new = choice.logprobs.model_dump() if choice.logprobs else {}
        logprobs = {name: (known.get(name) or []) + (new.get(name) or []) for name in {**known, **new}}
        found[choice.index] = text + choice.text, choice.finish_reason or finish, logprobs
    return [found[index] for index in sorted(found)]


@pytest.fixture
async def spark(server: ModelServer) -> AsyncIterator[Any]:
    """The bundled model, which the server samples from."""
    model = AutoModelForCausalLM.from_pretrained(str(files("leyden") / "models" / "spark"), dtype=torch.float32)
    engine, gateway = TorchEngine(model, slots=4), server.service.gateway
    assert gateway is not None
    gateway.models = {name: replace(policy, engine=engine) for name, policy in gateway.models.items()}
    yield model
    engine.close()


async def test_the_logprobs_of_a_prompt_are_the_models(
    server: ModelServer, client: openai.AsyncOpenAI, spark: Any
) -> None:
    text = "The sum of 3 and 4 is 7."
    ((written, _, logprobs),) = await echoed(client, False, prompt=text, logprobs=2, max_tokens=0)
    assert written == text
    ids = torch.tensor([server.tokenizer.encode(text)])
    with torch.no_grad():
        expected = torch.log_softmax(spark(ids).logits[0, :-1], -1)
    chosen = expected.gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs["token_logprobs"][1:]), chosen, atol=1e-4, rtol=0)
    best = [max(top.values()) for top in logprobs["top_logprobs"][1:]]
    torch.testing.assert_close(torch.tensor(best), expected.amax(-1), atol=1e-4, rtol=0)
    assert all(token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))
    assert "".join(logprobs["tokens"]) == text


async def test_a_text_after_an_echoed_one_is_continued_only_where_something_was_sampled(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = [" two" + END, " four" + END]
    ids = server.tokenizer.encode("One, two, three")
    await client.completions.create(model="m", prompt=ids, echo=True, logprobs=1, max_tokens=0)
    await client.completions.create(model="m", prompt=ids[:-1], max_tokens=5)
    await client.completions.create(model="m", prompt="One, two, three", max_tokens=5)
    episode = await server.episode()
    assert [made.prompt_origin for made in episode.calls] == [PromptOrigin.FRESH] * 3
    assert [bool(made.completion_ids) for made in episode.calls] == [False, True, True]


async def test_a_completion_of_no_tokens_is_empty(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    for echo in (False, True):
        (choice,) = (await client.completions.create(model="m", prompt="One,", max_tokens=0, echo=echo)).choices
        assert (choice.text, choice.finish_reason) == ("One," if echo else "", "length")
    assert not server.engine.requests


async def test_a_completion_has_sixteen_tokens_unless_told_otherwise(
    server: ModelServer, client: openai.AsyncOpenAI
) -> None:
    server.lines = [" one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen" + END]
    completion = await client.completions.create(model="m", prompt="Count:")
    assert completion.choices[0].finish_reason == "length"
    assert len((await server.episode()).calls[0].completion_ids) == 16


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt"),
        ({"prompt": [1] * 40_000}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(client: openai.AsyncOpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="m", **options)
    assert refused.value.param == param


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    server: ModelServer, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.tokenizer, "encode", None)
    text = "a " * (server.engine.context_length * server.tokenizer.longest_token // 2 + 1)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="m", prompt=text)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


async def test_a_model_of_the_upstream_takes_no_tokens_which_are_the_policys(server: ModelServer) -> None:
    assert server.service.gateway is not None
    server.service.gateway.upstream = UpstreamClient("http://127.0.0.1:9/v1")
    key = await server.new_attempt("routed", routes={"far": "upstream"})
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="send the prompt as text"):
            await client.completions.create(model="far", prompt=[1, 2, 3])
    assert not (await server.episode()).calls
