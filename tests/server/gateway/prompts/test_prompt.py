"""Prompts of calls: what stays of earlier turns, and what is made beside the event loop."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import openai
import pytest
from modelserving import END, ModelServer, call, model_server

from leyden.records import Call, PromptOrigin
from leyden.rendering.chatml import ChatMLRenderer
from leyden.server.gateway.calls.scheduler import Scheduler
from leyden.server.gateway.prompts.history import AnswerDetails
from leyden.server.gateway.prompts.prompt import DROPS_REASONING
from leyden.server.gateway.served_model import ServedModel

TEMPLATES = Path(__file__).parents[3] / "data/templates"
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
THOUGHT = "<think>\nHm.\n</think>\n\n"
Keep = Literal["template", "exact"]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ModelServer]:
    async with model_server(tmp_path) as running:
        yield running


async def converse(server: ModelServer, keep: Keep, *answers: str) -> list[tuple[Call, str]]:
    """An agent that gives back all that it got, with a tool's results or else more questions; calls and prompts."""
    key = await server.new_attempt(keep, history=keep)
    server.lines = [answer + END for answer in answers]
    messages: list[Any] = [{"role": "user", "content": "Why?"}]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        for _ in answers:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[LOOK])
            said = answer.choices[0].message
            results = [{"role": "tool", "tool_call_id": made.id, "content": "x"} for made in said.tool_calls or ()]
            messages += [said.model_dump(exclude_none=True), *(results or [{"role": "user", "content": "And?"}])]
    episode = await server.check(calls=len(answers))
    return [(made, server.tokenizer.decode(episode.prompt_ids(made))) for made in episode.calls]


@pytest.mark.parametrize("keep", ["template", "exact"])
async def test_reasoning_of_earlier_turns_is_dropped_where_the_template_drops_it(
    server: ModelServer, keep: Keep
) -> None:
    server.serve("Qwen/Qwen3-0.6B", "qwen3")
    calling = THOUGHT + call("look", "{}")
    _, (used, in_cycle), (asked, after) = await converse(server, keep, calling, THOUGHT + "So.", "Because.")
    assert (used.prompt_origin, "Hm." in in_cycle) == (
        PromptOrigin.CONTINUED,
        True,
    )  # until the user speaks, Qwen3 shows it
    if keep == "template":
        assert (asked.prompt_origin, asked.origin_reason) == (PromptOrigin.RERENDERED, DROPS_REASONING)
        assert "Hm." not in after
        assert "So." in after
    else:
        assert (asked.prompt_origin, after.count("Hm.")) == (PromptOrigin.CONTINUED, 2)


async def test_a_turn_without_reasoning_is_continued_under_any_template(server: ModelServer) -> None:
    server.serve("Qwen/Qwen3-0.6B", "qwen3")
    _, (second, _), (third, _) = await converse(server, "template", "So.", "It is.", "Because.")
    assert [second.prompt_origin, third.prompt_origin] == [PromptOrigin.CONTINUED] * 2


@pytest.mark.parametrize("keep", ["template", "exact"])
async def test_a_template_that_never_shows_reasoning_drops_it_at_once(server: ModelServer, keep: Keep) -> None:
    server.serve("smollm2", "smollm2")
    _, (used, prompt), (plain, _) = await converse(server, keep, THOUGHT + call("look", "{}"), "So.", "Because.")
    assert (used.prompt_origin, "Hm." in prompt) == (
        (PromptOrigin.RERENDERED, False) if keep == "template" else (PromptOrigin.CONTINUED, True)
    )
    assert used.origin_reason == (DROPS_REASONING if keep == "template" else "")
    assert plain.prompt_origin is PromptOrigin.CONTINUED


@pytest.mark.parametrize("keep", ["template", "exact"])
async def test_spark_keeps_its_reasoning(server: ModelServer, keep: Keep) -> None:
    _, (second, prompt) = await converse(server, keep, THOUGHT + "So.", "Because.")
    assert (second.prompt_origin, "Hm." in prompt) == (PromptOrigin.CONTINUED, True)


class Watched(ChatMLRenderer):
    """Notes in which thread it works."""

    beside_the_loop: ClassVar[list[bool]] = []

    def bridge_to_next_turn(self, *args: Any, **kwargs: Any) -> Any:
        self.beside_the_loop.append(threading.current_thread() is not threading.main_thread())
        return super().bridge_to_next_turn(*args, **kwargs)

    def render_ids(self, *args: Any, **kwargs: Any) -> list[int]:
        self.beside_the_loop.append(threading.current_thread() is not threading.main_thread())
        return super().render_ids(*args, **kwargs)


async def test_concurrent_calls_match_their_prefixes_when_long_prompts_are_built_in_threads(
    server: ModelServer,
) -> None:
    policy = ServedModel("spark", server.engine, Watched(server.tokenizer), server.tokenizer, Scheduler())
    assert server.service.gateway is not None
    server.service.gateway.models, aside = {"spark": policy}, Watched.beside_the_loop
    key = await server.new_attempt()
    numbers = itertools.count()
    server.say = lambda _: f"Answer {next(numbers)}" + END
    long = "All the words. " * 40
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:

        async def say(history: list[Any], text: str) -> list[Any]:
            messages = [*history, {"role": "user", "content": text}]
            answer = await client.chat.completions.create(model="m", messages=messages)
            return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}]

        root = await say([], "Hi")
        aside.clear()  # of the first call, before which the model's end of reasoning is found
        branches = await asyncio.gather(*(say(root, text) for text in (f"1 {long}", "2", f"3 {long}", "4")))
        leaves = await asyncio.gather(*(say(branch, f"{n} {long}") for n, branch in enumerate([*branches, []])))
        assert (aside.count(True), aside.count(False)) == (7, 2)
        await asyncio.gather(*(say(leaf, "short again") for leaf in leaves))
        assert (aside.count(True), aside.count(False)) == (7, 7)
    episode = await server.check(calls=15)
    by_id = {made.id: made for made in episode.calls}
    assert [made.prompt_origin for made in episode.calls].count(PromptOrigin.FRESH) == 2
    assert {made.prompt_origin for made in episode.calls} == {PromptOrigin.FRESH, PromptOrigin.CONTINUED}
    for made in episode.calls:
        messages = episode.messages(made)
        prompt = server.tokenizer.decode(episode.prompt_ids(made))
        assert all(message["content"] in prompt for message in messages)
        if made.prompt_origin is PromptOrigin.CONTINUED:
            assert made.parent is not None
            assert messages[-2]["content"] == by_id[made.parent].response["content"]


async def test_of_many_calls_with_the_same_answer_few_are_compared_and_the_latest_is_continued(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await server.new_attempt()
    server.say = lambda _: THOUGHT + "So." + END
    ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Why?"}]}
    compared: list[AnswerDetails] = []

    def noted(ours: AnswerDetails, theirs: AnswerDetails) -> frozenset[str] | None:
        compared.append(theirs)
        return dropped(ours, theirs)

    dropped = AnswerDetails.dropped
    monkeypatch.setattr(AnswerDetails, "dropped", noted)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        said = [(await client.chat.completions.create(**ask)).choices[0].message.model_dump() for _ in range(70)][-1]
        for sent, count in ((said, 0), ({"role": "assistant", "content": "So."}, 64)):
            compared.clear()
            messages = [*ask["messages"], sent, {"role": "user", "content": f"And {count}?"}]
            await client.chat.completions.create(model="m", messages=messages)
            assert len(compared) == count
    episode = await server.check(calls=72)
    assert [made.parent for made in episode.calls[70:]] == [episode.calls[69].id] * 2
