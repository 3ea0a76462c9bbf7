"""Attempts that get their first answers from the record of another, through the official clients."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import openai
import pytest
from google import genai
from modelserving import END, ModelServer, call, model_server
from randomness import examples, new_seed

from leyden.api.client import Remote
from leyden.api.wire import FinishRequest
from leyden.episodes import Episode
from leyden.outcomes import Ending, Outcome, Retry
from leyden.records import Call, CallStatus, FixedAnswer, Origin, Reward
from leyden.server.control.keys import KeyKind
from leyden.server.gateway.calls import replay
from leyden.server.gateway.prompts.history import meanings
from leyden.server.gateway.upstream.client import UpstreamClient

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
LOST = FinishRequest(Outcome(Ending.LOST), retry=Retry.FREE)
Heard = tuple[str, list[tuple[str, Any]]]
"""What the model said: a text, and the names and arguments of its calls."""


class Clients:
    """The official clients with the key of the server's current attempt."""

    def __init__(
        self,
        server: ModelServer,
        openai_: openai.AsyncOpenAI,
        anthropic_: anthropic.AsyncAnthropic,
        google: genai.client.AsyncClient,
    ) -> None:
        self.server, self.openai, self.anthropic, self.google = server, openai_, anthropic_, google

    async def chat(self, said: list[Any], stream: bool = False, **more: Any) -> list[Any]:
        """The messages of the answers."""
        body: dict[str, Any] = {"model": "m", "messages": said, "tools": [TOOL], **more}
        if not stream:
            choices = (await self.openai.chat.completions.create(**body)).choices
            return [choice.message.to_dict() for choice in choices]
        async with self.openai.chat.completions.stream(**body) as events:
            return [choice.message.to_dict() for choice in (await events.get_final_completion()).choices]

    async def messages(self, said: list[Any], stream: bool = False) -> list[Any]:
        """The content of the answer."""
        tool: Any = {"name": "add", "input_schema": SCHEMA}
        body: dict[str, Any] = {"model": "m", "max_tokens": 999, "messages": said, "tools": [tool]}
        if not stream:
            return [block.to_dict() for block in (await self.anthropic.messages.create(**body)).content]
        async with self.anthropic.messages.stream(**body) as events:
            return [block.to_dict() for block in (await events.get_final_message()).content]

    async def responses(self, said: list[Any], stream: bool = False) -> list[Any]:
        """The items of the answer."""
        tool: Any = {"type": "function", "name": "add", "parameters": SCHEMA}
        body: dict[str, Any] = {"model": "m", "input": said, "tools": [tool]}
        if not stream:
            whole = await self.openai.responses.create(**body)
        else:
            async with self.openai.responses.stream(**body) as events:
                whole = await events.get_final_response()
        return [item.to_dict() for item in whole.output]

    async def generate(self, said: list[Any], stream: bool = False) -> list[Any]:
        """The parts of the answer, in Google's dialect; how the stream of a text was split is not in the record."""
        tool: Any = {"function_declarations": [{"name": "add", "parameters_json_schema": SCHEMA}]}
        body: dict[str, Any] = {"model": "m", "contents": said, "config": {"tools": [tool]}}
        if stream:
            chunks = [chunk async for chunk in await self.google.models.generate_content_stream(**body)]
        else:
            chunks = [await self.google.models.generate_content(**body)]
        parts: list[Any] = []
        for chunk in chunks:
            for one in chunk.candidates or ():
                for part in (one.content.parts if one.content else None) or ():
                    made = part.model_dump(exclude_none=True)
                    if made.keys() == {"text"} and parts and parts[-1].keys() == {"text"}:
                        parts[-1]["text"] += made["text"]
                    else:
                        parts.append(made)
        return parts

    async def text(self, prompt: str, stream: bool = False) -> str:
        """The text that follows."""
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 99}
        if not stream:
            return (await self.openai.completions.create(**body)).choices[0].text
        return "".join(
            [chunk.choices[0].text async for chunk in await self.openai.completions.create(**body, stream=True)]
        )


@asynccontextmanager
async def clients(server: ModelServer) -> AsyncIterator[Clients]:
    key: Any = {"api_key": server.key, "max_retries": 0}
    async with (
        openai.DefaultAsyncHttpxClient() as http,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", http_client=http, **key) as one,
        anthropic.AsyncAnthropic(base_url=server.url, http_client=http, **key) as other,
        genai.Client(api_key=server.key, http_options={"base_url": server.url}).aio as google,
    ):
        yield Clients(server, one, other, google)


def never_the_same(server: ModelServer, seed: int = 0) -> None:
    """Let the model say something else every time."""
    chance = Random(seed)

    def say(_: str) -> str:
        number = chance.random()
        return (call("add", f'{{"a": {number}}}') if number < 0.5 else f"It is {number}.") + END

    server.say = say


async def agent(
    ask: Clients, seed: int, restarts: bool = False, forms: Random | None = None
) -> tuple[list[Any], list[list[Heard]]]:
    """Some conversations at the same time, each of its own dialect, that depend on all that they are answered.

    Those with messages are held in other dialects, and all of them streamed or not, as `forms` has it. Returns what
    each has said and heard.
    """
    plan = Random(seed)

    async def converse(
        name: int, dialect: str, stream: bool, choices: int, turns: int
    ) -> tuple[list[Any], list[Heard]]:
        if forms is not None:
            stream = forms.random() < 0.5
            dialect = forms.choice(WITH_MESSAGES) if dialect != "text" and choices == 1 else dialect
        question = f"Question {name}"
        content = {"parts": [{"text": question}]} if dialect == "google" else {"content": question}
        said: list[Any] = [{"role": "user", **content}]
        heard: list[Heard] = []
        for turn in range(turns):
            await asyncio.sleep(Random().random() / 500)  # they arrive in any order
            if restarts:
                ask.server.forget_attempts()
            more, answer = await TURNS[dialect](ask, said, stream, 1 if turn else choices, f"And {turn}?")
            said += more
            heard.append(answer)
        return said, heard

    dialects = plan.choices([*WITH_MESSAGES, "text"], k=1 if restarts else 3)
    plans = [
        (name, dialect, plan.random() < 0.5, 1 + (dialect == "chat" and plan.random() < 0.5), plan.randint(1, 4))
        for name, dialect in enumerate(dialects)
    ]
    conversations = await asyncio.gather(*(converse(*one) for one in plans))
    return [said for said, _ in conversations], [heard for _, heard in conversations]


async def chat_turn(ask: Clients, said: list[Any], stream: bool, choices: int, more: str) -> tuple[list[Any], Heard]:
    answer = (await ask.chat(said, stream, n=choices))[-1]
    made = answer.get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "5"} for one in made]
    called = [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in made]
    return [answer, *(results or [{"role": "user", "content": more}])], (answer.get("content") or "", called)


async def messages_turn(ask: Clients, said: list[Any], stream: bool, _: int, more: str) -> tuple[list[Any], Heard]:
    blocks = await ask.messages(said, stream)
    used = [one for one in blocks if one["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": one["id"], "content": "5"} for one in used]
    text = "".join(one["text"] for one in blocks if one["type"] == "text")
    following = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results or more}]
    return following, (text, [(one["name"], one["input"]) for one in used])


async def responses_turn(ask: Clients, said: list[Any], stream: bool, _: int, more: str) -> tuple[list[Any], Heard]:
    items = await ask.responses(said, stream)
    called = [item for item in items if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "5"} for item in called]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    following = [*items, *(results or [{"role": "user", "content": more}])]
    return following, (text, [(item["name"], json.loads(item["arguments"])) for item in called])


async def google_turn(ask: Clients, said: list[Any], stream: bool, _: int, more: str) -> tuple[list[Any], Heard]:
    parts = await ask.generate(said, stream)
    called = [part["function_call"] for part in parts if "function_call" in part]
    results = [{"function_response": {"name": one["name"], "response": {"output": "5"}}} for one in called]
    text = "".join(part.get("text", "") for part in parts)
    following = [{"role": "model", "parts": parts}, {"role": "user", "parts": results or [{"text": more}]}]
    return following, (text, [(one["name"], one["args"]) for one in called])


async def text_turn(ask: Clients, said: list[Any], stream: bool, _: int, more: str) -> tuple[list[Any], Heard]:
    answer = await ask.text("".join(one["content"] for one in said), stream)
    return [{"content": answer + more}], (answer, [])


TURNS = {
    "chat": chat_turn,
    "messages": messages_turn,
    "responses": responses_turn,
    "google": google_turn,
    "text": text_turn,
}
"""By dialect, what lets the model answer: it returns what is said next, which has the answer, and what is heard."""
WITH_MESSAGES = [dialect for dialect in TURNS if dialect != "text"]


async def finish(server: ModelServer, heard: list[list[Heard]]) -> Episode:
    """End the attempt with a reward for what the model said."""
    numbers = [float(number) for number in re.findall(r"\d\.[\d.e-]*\d", json.dumps(heard))]
    report = FinishRequest(Outcome(Ending.SUCCEEDED), rewards=(Reward("final", sum(numbers)),))
    async with Remote(server.url, server.service.keyring.create(KeyKind.WORKER, 60)[0]) as worker:
        await worker.finish(server.run, server.attempt, report)
    return await server.episode()


def sampled_part(made: Call) -> Any:
    """What a replayed call has in common with the one that was sampled."""
    return (made.id, made.completion_ids, made.logprobs, made.versions, made.response, made.finish, made.sampling)


def by_id(episode: Episode) -> dict[str, Call]:
    return {made.id: made for made in episode.calls}


async def test_an_agent_that_replays_its_own_record_gives_the_same_and_branches_from_any_call(tmp_path: Path) -> None:
    first_seed = new_seed()
    async with model_server(tmp_path) as server:
        for seed in range(first_seed, first_seed + examples(20)):
            never_the_same(server, seed)
            chance, restarts = Random(seed), seed % 3 == 0
            await server.new_attempt(f"g{seed}")
            async with clients(server) as ask:
                said, heard = await agent(ask, seed, restarts)
            recorded, sampled = await finish(server, heard), len(server.engine.requests)
            count, reward = len(recorded.calls), recorded.final_reward(0.0)
            assert reward
            for name, forms in (("same", None), *((f"otherwise-{n}-", Random(f"{seed}/{n}")) for n in range(3))):
                await server.branch(f"{name}{seed}", Origin(recorded.attempt.id, count))
                async with clients(server) as ask:
                    said_again, heard_again = await agent(ask, seed, restarts, forms)
                assert heard_again == heard and (forms or said_again == said)
                same = await finish(server, heard_again)
                assert (same.attempt.outcome, same.final_reward(0.0)) == (recorded.attempt.outcome, reward)
                assert len(server.engine.requests) == sampled and same.attempt.diverged is None
                assert {id: sampled_part(made) for id, made in by_id(same).items()} == {
                    made.id: sampled_part(made) for made in recorded.calls
                }
                for made in same.calls:
                    assert made.origin == recorded.attempt.id
                    assert same.prompt_ids(made) == recorded.prompt_ids(by_id(recorded)[made.id])
            k = chance.randint(1, count)
            await server.branch(f"branch{seed}", Origin(same.attempt.id, k))
            async with clients(server) as ask:
                await agent(ask, seed, restarts)
            branch = await server.episode()
            replayed = {made.id for made in branch.calls if made.origin}
            assert branch.attempt.diverged is None and {made.id for made in same.calls[:k]} <= replayed
            firsts = {made.parent if made.choice else made.id for made in same.calls[:k]}
            assert {made.parent if made.choice else made.id for made in branch.calls if made.origin} == firsts
            assert {made.origin for made in branch.calls} <= {recorded.attempt.id, None}  # never one that replayed
            assert not (by_id(branch).keys() - replayed) & by_id(same).keys()


async def test_a_prompt_that_differs_is_named_and_the_attempt_goes_on_as_an_ordinary_one(
    server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    never_the_same(server)

    async def dated(ask: Clients, date: str) -> None:
        said: list[Any] = [{"role": "user", "content": "Hello"}]
        said += [(await ask.chat(said))[0], {"role": "user", "content": f"You are an agent. Today is {date}. Begin."}]
        said += [(await ask.chat(said))[0], {"role": "user", "content": "Go on"}]
        await ask.chat(said)

    async with clients(server) as ask:
        await dated(ask, "2026-11-18")
    recorded = await server.episode()
    await server.branch("h", Origin(recorded.attempt.id, 3))
    async with clients(server) as ask:
        await dated(ask, "2026-11-19")
    episode = await server.check(calls=3)
    assert [made.origin for made in episode.calls] == [recorded.attempt.id, None, None]
    assert episode.attempt.diverged is not None and episode.attempt.diverged.number == 2
    why = 'message 3 (user) was "…. Today is 2026-11-18. Begin." and is "…. Today is 2026-11-19. Begin."'
    assert episode.attempt.diverged.why == why
    assert "leaves the record that it replays at call 2" in caplog.text


async def test_a_request_that_leaves_a_long_record_is_compared_with_few_of_its_requests(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_the_same(server)
    said: list[Any] = [{"role": "user", "content": "Hello"}]
    async with clients(server) as ask:
        for _ in range(20):
            said += [(await ask.chat(said))[0], {"role": "user", "content": "Go on"}]
    await server.branch("h", Origin(server.attempt, 20))
    compared: list[int] = []

    def noted(messages: Any) -> list[bytes]:
        compared.append(len(messages))
        return meanings(messages)

    monkeypatch.setattr(replay, "meanings", noted)
    async with clients(server) as ask:
        await ask.chat([{"role": "user", "content": "Goodbye"}])
    assert {*compared} == {*range(1, 33, 2)}  # the messages of 16 requests
    diverged = (await server.episode()).attempt.diverged
    assert diverged is not None and diverged.why == 'message 1 (user) was "Hello" and is "Goodbye"'


async def test_other_tools_choices_and_alternatives_are_named(server: ModelServer) -> None:
    never_the_same(server)
    said: list[Any] = [{"role": "user", "content": "Hello"}]
    async with clients(server) as ask:
        await ask.chat(said)
    origin = Origin(server.attempt, 1)
    for number, (more, why) in enumerate(
        (
            ({"tools": []}, "it offers other tools"),
            ({"n": 2}, "it asks for 2 answers, and the recorded call asked for 1"),
            ({"logprobs": True, "top_logprobs": 2}, "it requests logprobs of other tokens"),
            ({"messages": [*said, *said]}, 'message 2 (user) is new: "Hello"'),
        )
    ):
        await server.branch(f"h{number}", origin)
        async with clients(server) as ask:
            await ask.chat(said, **more)
        diverged = (await server.episode()).attempt.diverged
        assert diverged is not None and diverged.number == 1 and diverged.why.startswith(why)


async def test_a_retry_after_a_crash_loses_no_answer(server: ModelServer) -> None:
    never_the_same(server)
    store = server.service.store

    async def until(calls: int) -> Episode:
        """Run the agent, crash before it has one more answer, and start the next attempt."""
        async with clients(server) as ask:
            said: list[Any] = []
            for number in range(calls):
                said += [{"role": "user", "content": f"Question {number}"}]
                said += await ask.chat(said)
        episode = await server.episode()
        await store.finish(server.run, server.attempt, LOST)
        await server.next_attempt()
        return episode

    first = await until(3)
    shorter = await until(2)  # it dies while it replays
    longer = await until(5)
    again = await until(5)
    attempts = [first.attempt.id, longer.attempt.id]
    assert [episode.attempt.origin for episode in (first, shorter, longer, again)] == [
        None,
        Origin(attempts[0], 3),
        Origin(attempts[0], 3),
        Origin(attempts[1], 5),
    ]
    assert [made.origin for made in longer.calls] == [attempts[0]] * 3 + [None] * 2
    assert [made.origin for made in again.calls] == [attempts[0]] * 3 + [attempts[1]] * 2
    assert [made.id for made in again.calls] == [made.id for made in longer.calls]
    assert {again.exclusion_reason(made) for made in again.calls} == {None}  # they are its own


async def test_a_call_that_failed_is_sampled_and_does_not_leave_the_record(server: ModelServer) -> None:
    never_the_same(server)
    store, say = server.service.store, server.say
    said: list[Any] = [{"role": "user", "content": "Hello"}]
    async with clients(server) as ask:
        said += [(await ask.chat(said))[0], {"role": "user", "content": "Go on"}]
        server.engine.script = lambda _: [-1]
        with pytest.raises(openai.InternalServerError):
            await ask.chat(said)
    server.engine.script, server.say = server._script, say
    await store.finish(server.run, server.attempt, FinishRequest(Outcome(Ending.ENGINE_ERROR), retry=Retry.FREE))
    await server.next_attempt()
    async with clients(server) as ask:
        assert await ask.chat(said[:1]) == said[1:2]
        await ask.chat(said)
    episode = await server.check(calls=2)
    assert episode.attempt.diverged is None
    assert [(made.origin is None, made.status) for made in episode.calls] == [
        (False, CallStatus.OK),
        (True, CallStatus.OK),
    ]


async def test_a_rollout_that_begins_inside_another_has_what_was_left_of_its_limits(tmp_path: Path) -> None:
    """So what it returns is an estimate of the value of that state."""
    async with model_server(tmp_path) as server:
        server.say = lambda _: "one two three four five" + END
        tokens = len(server.tokenizer.encode("one two three four five" + END))

        async def calls() -> int:
            async with clients(server) as ask:
                for number in range(9):
                    try:
                        await ask.chat([{"role": "user", "content": f"Question {number}"}])
                    except openai.APIStatusError:
                        return number
            return 9

        for name, limits, allowed in (("c", {"max_calls": 3}, 3), ("t", {"max_tokens": 2 * tokens}, 2)):
            await server.new_attempt(name, **limits)
            assert await calls() == allowed
            await server.branch(f"{name}-1", Origin(server.attempt, 1))
            assert await calls() == allowed
            await server.service.store.finish(server.run, server.attempt, LOST)
            await server.next_attempt()
            assert await calls() == allowed and (await server.episode()).calls[1].origin is not None


async def test_calls_that_were_made_at_the_same_time_are_replayed_one_after_the_other(tmp_path: Path) -> None:
    """Though the tokens of the first leave none to the second: in the record it had begun before."""
    async with model_server(tmp_path) as server:
        server.say = lambda _: "one two three four five" + END
        await server.new_attempt(max_tokens=len(server.tokenizer.encode("one two three four five" + END)))
        questions = [[{"role": "user", "content": f"Question {number}"}] for number in range(2)]
        server.engine.delay_s = 0.1
        async with clients(server) as ask:
            answers = await asyncio.gather(*map(ask.chat, questions))
        await server.branch("h", Origin(server.attempt, 2))
        async with clients(server) as ask:
            assert [await ask.chat(question) for question in questions] == answers
            with pytest.raises(openai.APIStatusError, match="max_tokens"):
                await ask.chat([*questions[0], *questions[1]])


async def test_calls_to_an_upstream_and_fixed_answers_are_replayed_by_their_request(tmp_path: Path) -> None:
    async with model_server(tmp_path / "far") as far, model_server(tmp_path / "near") as near:
        never_the_same(far)
        await far.new_attempt()
        await near.new_attempt(routes={"gpt": "upstream", "title": FixedAnswer("A title"), "m": "spark"})
        assert near.service.gateway is not None
        near.service.gateway.upstream = UpstreamClient(f"{far.url}/v1", far.key)
        said: list[Any] = [{"role": "user", "content": "Well?"}]

        async def usage() -> Any:
            async with clients(near) as ask:
                return (await ask.openai.chat.completions.create(model="gpt", messages=said)).usage

        async def judged(stream: bool) -> list[Any]:
            async with clients(near) as ask:
                judge = await ask.chat(said, stream, model="gpt", temperature=0.5)
                return [
                    *judge,
                    *await ask.chat(said, model="title"),
                    *await ask.chat([*said, *judge, *said], model="gpt"),
                ]

        answers = await judged(stream=False)
        origin, asked = near.attempt, len(far.engine.requests)
        await near.branch("h", Origin(origin, 3))

        def meaning(answer: dict[str, Any]) -> Any:
            made = [
                (one["id"], one["function"]["name"], one["function"]["arguments"])
                for one in answer.get("tool_calls") or ()
            ]
            return answer.get("content") or "", made

        assert list(map(meaning, await judged(stream=True))) == list(map(meaning, answers))
        episode = await near.check(calls=3)
        assert len(far.engine.requests) == asked and [made.origin for made in episode.calls] == [origin] * 3
        used = await usage()
        assert used.prompt_tokens > 0 and used.completion_tokens > 0
        await near.branch("used", Origin(near.attempt, 4))
        await judged(stream=False)
        assert await usage() == used and len(far.engine.requests) == asked + 1
        await near.branch("i", Origin(origin, 3))
        async with clients(near) as ask:
            await ask.chat(said, model="gpt", temperature=0.7)
        diverged = (await near.episode()).attempt.diverged
        assert diverged is not None and "with other parameters" in diverged.why


async def test_a_required_call_of_a_rollout_that_vllm_sampled_is_replayed_without_it(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM leaves calls of training rollouts free of a grammar, so the prompt begins the call."""
    server.lines = [call("add", '{"a": 2}').removeprefix("<tool_call>\n") + END]
    said: list[Any] = [{"role": "user", "content": "Hello"}]
    async with clients(server) as ask:
        answer = await ask.chat(said, tool_choice="required")
    assert answer[0]["tool_calls"]
    monkeypatch.setattr(server.engine, "reports_allowed_mass", True, raising=False)  # as the embedded engine does
    await server.branch("h", Origin(server.attempt, 1))
    async with clients(server) as ask:
        assert await ask.chat(said, tool_choice="required") == answer
    assert (await server.episode()).attempt.diverged is None


async def test_a_replayed_call_needs_no_engine(server: ModelServer) -> None:
    never_the_same(server)
    said: list[Any] = [{"role": "user", "content": "Hello"}]
    async with clients(server) as ask:
        answer = await ask.chat(said)
    await server.branch("h", Origin(server.attempt, 1))
    assert server.service.gateway is not None
    server.service.gateway.models["spark"].hold()  # the weights change
    async with clients(server) as ask, asyncio.timeout(60):
        assert await ask.chat(said) == answer


async def test_a_client_that_disconnects_from_a_replayed_answer_asks_again_and_goes_on(server: ModelServer) -> None:
    long = "so it goes " * 500
    server.say = lambda _: f"{long}{len(server.engine.requests)}{END}"

    async def answered(ask: Clients, said: list[Any]) -> list[Any]:
        for number in range(3):
            said = [*said, {"role": "user", "content": f"Question {number}"}]
            said += await ask.chat(said)
        return said

    async with clients(server) as ask:
        said = await answered(ask, [])
    recorded = await server.episode()
    for at in range(3):
        await server.branch(f"left-{at}", Origin(recorded.attempt.id, 3))
        sampled = len(server.engine.requests)
        async with clients(server) as ask:
            for number in range(at):
                assert await ask.chat(said[: 2 * number + 1]) == [said[2 * number + 1]]
            body: Any = {"model": "m", "messages": said[: 2 * at + 1], "tools": [TOOL], "stream": True}
            async with await ask.openai.chat.completions.create(**body) as events:
                await anext(aiter(events))
            [again] = await ask.chat(said[: 2 * at + 1])
            await ask.chat([*said[: 2 * at + 1], again, {"role": "user", "content": "Something new"}])
        episode = await server.episode()
        assert episode.attempt.diverged is None and len(server.engine.requests) == sampled + 2
        assert [made.id for made in episode.calls if made.origin] == [made.id for made in recorded.calls[: at + 1]]
        left, others = episode.calls[at], [made.status for made in episode.calls if made.id != recorded.calls[at].id]
        assert left.status in (CallStatus.OK, CallStatus.ABANDONED)  # as far as the answer got
        assert others == [CallStatus.OK] * (at + 2)


async def test_a_retry_of_an_attempt_that_left_the_record_does_not_begin_as_its_rollout_should(
    server: ModelServer,
) -> None:
    """It replays its own rollout, exactly; another way into the state that the rollout begins with is none."""
    never_the_same(server)
    said: list[Any] = [{"role": "user", "content": "Hello"}]
    async with clients(server) as ask:
        said += [(await ask.chat(said))[0], {"role": "user", "content": "Go on"}]
        await ask.chat(said)
    origin = Origin(server.attempt, 1)
    for name, first in (("begins", "Hello"), ("left", "Good morning")):
        await server.branch(name, origin)
        for again in (False, True):
            async with clients(server) as ask:
                await ask.chat([{"role": "user", "content": first}])
                await ask.chat([{"role": "user", "content": "Something new"}])
            episode = await server.episode()
            assert episode.left_origin == (name == "left")
            if not again:
                await server.service.store.finish(server.run, server.attempt, LOST)
                await server.next_attempt()
        assert episode.attempt.diverged is None or name == "left"
        assert [made.origin is not None for made in episode.calls] == [True, True]


async def test_a_rollout_begins_as_it_should_if_it_has_replayed_all_and_not_only_what_it_has_asked(
    server: ModelServer,
) -> None:
    never_the_same(server)
    async with clients(server) as ask:
        for number in range(3):
            await ask.chat([{"role": "user", "content": f"Question {number}"}])
    recorded = await server.episode()
    assert recorded.replayable == 3
    for asked, left in (((0, 1), False), ((1, 0), False), ((0,), True), ((2,), True)):
        await server.branch(f"asks-{'-'.join(map(str, asked))}", Origin(recorded.attempt.id, 2))
        async with clients(server) as ask:
            for number in asked:
                await ask.chat([{"role": "user", "content": f"Question {number}"}])
        assert (await server.episode()).left_origin == left


async def test_an_answer_that_the_client_did_not_use_answers_nobody(server: ModelServer) -> None:
    """It requested another, with which the conversation went on."""
    never_the_same(server)
    retry = {"x-stainless-retry-count": "1"}

    async def agent(ask: Clients, retries: bool) -> list[Any]:
        said: list[Any] = [{"role": "user", "content": "Hello"}]
        for number in range(2):
            answer = await ask.chat(said)
            if retries:
                answer = await ask.chat(said, extra_headers=retry)
            said += [*answer, {"role": "user", "content": f"Go on {number}"}]
        return said

    async with clients(server) as ask:
        said = await agent(ask, retries=True)
    recorded = await server.episode()
    assert [made.retry_of is not None for made in recorded.calls] == [False, True, False, True]
    assert recorded.replayable == 0
    await server.branch("h", Origin(recorded.attempt.id, 4))
    async with clients(server) as ask:
        assert await agent(ask, retries=False) == said
    episode = await server.check(calls=2)
    assert [made.id for made in episode.calls] == [recorded.calls[1].id, recorded.calls[3].id]
    assert episode.attempt.diverged is None
