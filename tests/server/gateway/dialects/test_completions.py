"""The OpenAI completions dialect, through the official client, unmodified."""

from pathlib import Path
from typing import Any

import openai
import pytest
from modelserving import END, ModelServer, model_server

from leyden.records import PromptOrigin
from leyden.server.gateway.prompt import CUT_BY_STOP
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
    assert [made.made for made in episode.calls] == [PromptOrigin.FRESH, *[PromptOrigin.CONTINUED] * 2]
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
    assert agreed.made is PromptOrigin.CONTINUED
    assert differs.made is PromptOrigin.CONTINUED or differs.made_why == CUT_BY_STOP
    assert server.tokenizer.decode(episode.prompt_ids(differs)) == text + "Something else."


async def test_tokens_are_continued_as_they_are(server: ModelServer, client: openai.AsyncOpenAI) -> None:
    server.lines = [" two" + END, " four" + END, " six" + END]
    ids = server.tokenizer.encode("One,")
    wanted: Any = {"model": "m", "max_tokens": 20, "extra_body": {"return_token_ids": True}}
    first = await client.completions.create(prompt=ids, **wanted)
    sampled = first.choices[0].token_ids  # type: ignore[attr-defined]
    assert server.tokenizer.decode(sampled) == " two" + END
    assert first.choices[0].text == " two"
    with_end = [*ids, *sampled, *server.tokenizer.encode(" three,")]
    second = await client.completions.create(prompt=with_end, **wanted)
    without_end = [*with_end, *second.choices[0].token_ids[:-1], *server.tokenizer.encode(" five,")]  # type: ignore[attr-defined]
    await client.completions.create(prompt=without_end, **wanted)
    episode = await server.episode()
    assert [made.made for made in episode.calls] == [PromptOrigin.FRESH, *[PromptOrigin.CONTINUED] * 2]
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
        assert (await server.episode()).calls[1].made is PromptOrigin.CONTINUED


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
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "temperature": 3}, "temperature"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(client: openai.AsyncOpenAI, options: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="m", **options)
    assert refused.value.param == param


async def test_a_model_of_the_upstream_cannot_continue_a_text(server: ModelServer) -> None:
    assert server.service.gateway is not None
    server.service.gateway.upstream = UpstreamClient("http://127.0.0.1:9/v1")
    key = await server.new_attempt("routed", routes={"far": "upstream"})
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="send messages"):
            await client.completions.create(model="far", prompt="One,")
