"""Finds signals in what the real gateway records of real clients and frameworks."""

import asyncio
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from modelserving import END, ModelServer, call, model_server
from toolconversations import DIVIDE, USER
from worker_harness import worker_harness

from leyden.episodes import Episode
from leyden.rl.signals import Signal, find
from leyden.server.gateway.upstream.client import UpstreamClient

AGENTS = Path(__file__).parent / "agents"
ZERO, SIX, TEXT = '{"a": 1, "b": 0}', '{"a": 6, "b": 2}', '{"a": "x", "b": 2}'


def divides(prompt: str) -> str:
    """The model's answer after this many results: a bad and a good call, bad arguments, an unknown tool, the answer."""
    answers = {
        0: call("divide", ZERO) + call("divide", SIX),
        2: call("divide", TEXT),
        3: call("multiply", SIX),
        4: "It is 3.",
    }
    return answers[prompt.count("<tool_response>")] + END


def named(episode: Episode) -> list[tuple[int, str]]:
    """Index of the call and name of each signal of an episode."""
    numbers = {made.id: number for number, made in enumerate(episode.calls)}
    return [(numbers[signal.call.id], signal.name) for signal in find(episode)]


def about_tools(episode: Episode) -> list[Signal]:
    return [signal for signal in find(episode) if signal.kind in ("tool_failed", "tool_succeeded")]


FIRST = [(0, "tool_failed/1"), (0, "tool_succeeded/2"), (1, "bad_arguments/1"), (1, "tool_failed/1")]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Episode]:
    """An episode of every agent, all in one process: they import much."""

    async def run() -> dict[str, Episode]:
        async with worker_harness(tmp_path_factory.mktemp("home")) as harness:
            harness.server.say = divides
            await harness.open()
            agents = ["graph", "openai_agents", "anthropic_client"]
            agents += ["autogen"] if find_spec("autogen_agentchat") else []
            for agent in agents:
                await harness.queue(agent, {"agent": agent})
            with harness.worker("breaking.py:solve", base=str(AGENTS)):
                return {agent: (await harness.episodes(agent, timeout_s=300))[0] for agent in agents}

    return asyncio.run(run())


@pytest.mark.parametrize("agent", ["graph", "autogen", "anthropic_client"])
def test_tools_that_raise_are_seen_where_they_were_called(broken: dict[str, Episode], agent: str) -> None:
    if agent == "autogen":
        pytest.importorskip("autogen_agentchat")
    episode = broken[agent]
    assert named(episode) == [*FIRST, (2, "unknown_tool/1"), (2, "tool_failed/1")], episode.attempt.outcome
    ran = [signal.span is not None for signal in about_tools(episode)]
    assert ran == ([False] * 4 if agent == "anthropic_client" else [True, True, True, False])
    uninstrumented = Episode(episode.rollout, episode.attempt, episode.task, episode.calls)
    found = [(signal.name, signal.span) for signal in about_tools(uninstrumented)]
    if agent != "autogen":  # which gives the model the bare text of an exception: that looks like a result
        assert found == [(signal.name, None) for signal in about_tools(episode)]


def test_tools_of_the_openai_agents_sdk_that_raise_are_seen(broken: dict[str, Episode]) -> None:
    episode = broken["openai_agents"]
    assert named(episode) == [*FIRST, (2, "unknown_tool/1")]  # it has no answer to that but to raise
    assert all(signal.span is not None for signal in about_tools(episode))
    uninstrumented = Episode(episode.rollout, episode.attempt, episode.task, episode.calls)
    assert [signal.name for signal in about_tools(uninstrumented)] == [signal.name for signal in about_tools(episode)]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ModelServer]:
    async with model_server(tmp_path) as running:
        await running.new_attempt()
        yield running


BROKEN = '<tool_call>\n{"name": "divide", "arguments": {"a": 6,}}\n</tool_call>'
LINES = {
    BROKEN + END: ["malformed_call/1"],
    "I shall." + BROKEN + call("look", "{}") + END: ["malformed_call/1", "unknown_tool/2"],
    call("divide", "[6, 2]") + END: ["malformed_call"],
    call("divide", '{"a": 6}') + END: ["bad_arguments/1"],
    call("divide", SIX) + call("divide", SIX) + END: ["repeated_call/2"],
    "It is": ["cut"],
    "<tool_call>\n{": ["cut"],
    END: ["empty_answer"],
    "It is 3." + END: [],
    call("divide", SIX) + END: [],
}


@pytest.mark.parametrize(("line", "found"), LINES.items())
async def test_what_the_model_writes_is_seen_in_every_dialect(server: ModelServer, line: str, found: list[str]) -> None:
    server.say = lambda prompt: line
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client:
        await client.chat.completions.create(model="spark", messages=[USER], tools=[DIVIDE])
        stream = await client.chat.completions.create(model="spark", messages=[USER], tools=[DIVIDE], stream=True)
        assert [chunk async for chunk in stream]
        await client.chat.completions.create(model="spark", messages=[USER], tools=[DIVIDE], n=2)
    function = DIVIDE["function"]
    tool: Any = {"name": function["name"], "input_schema": function["parameters"]}
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key, max_retries=0) as other:
        await other.messages.create(model="spark", max_tokens=500, messages=[USER], tools=[tool])
    assert named(await server.episode()) == [(number, name) for number in range(5) for name in found]


async def test_calls_of_a_model_served_elsewhere_have_signals_too(tmp_path: Path, server: ModelServer) -> None:
    async with model_server(tmp_path / "near") as near:
        key = await near.new_attempt(routes={"gpt": "upstream"})
        assert near.service.gateway is not None
        near.service.gateway.upstream = UpstreamClient(f"{server.url}/v1", server.key)
        server.lines = [call("multiply", SIX) + END, BROKEN + END, "It is", END]
        async with openai.AsyncOpenAI(base_url=f"{near.url}/v1", api_key=key, max_retries=0) as client:
            for _ in range(4):
                await client.chat.completions.create(model="gpt", messages=[USER], tools=[DIVIDE])
        episode = await near.episode()
    assert {made.policy for made in episode.calls} == {"upstream"}
    assert named(episode) == [(0, "unknown_tool/1"), (1, "malformed_call/1"), (2, "cut"), (3, "empty_answer")]


async def test_tools_that_talk_of_errors_and_have_none_succeed(server: ModelServer) -> None:
    results = {"no errors found": ["tool_succeeded/1"], "Error bars: 0.3": [], "0.3 is the error": ["tool_succeeded/1"]}
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client:
        for number, text in enumerate(results):
            server.lines = [call("divide", SIX) + END, "Well." + END]
            messages: list[Any] = [{"role": "user", "content": f"Well, {number}?"}]
            answer = await client.chat.completions.create(model="spark", messages=messages, tools=[DIVIDE])
            (made,) = answer.choices[0].message.tool_calls or ()
            messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": text}]
            await client.chat.completions.create(model="spark", messages=messages, tools=[DIVIDE])
    found = named(await server.episode())
    assert found == [(2 * number, name) for number, names in enumerate(results.values()) for name in names]
