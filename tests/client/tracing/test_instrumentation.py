"""Agents of real frameworks, unchanged, end to end: each call on its attempt and beneath a span; roles are found."""

import asyncio
import json
import re

import pytest
from modelserving import END, call
from worker_harness import WorkerHarness, echo

from leyden.episodes import Episode
from leyden.records import Call, Span, trace_id

CALLS = {
    "team.py:solve": [
        ("boss", ["invoke_agent boss"]),
        ("clerk", ["invoke_agent clerk", "execute_tool clerk", "invoke_agent boss"]),
        ("boss", ["invoke_agent boss"]),
    ],
    "team.py:discuss": [("writer", ["invoke_agent writer"]), ("critic", ["invoke_agent critic"])],
    "react.py:solve": [
        ("boss", ["model", "boss"]),
        ("boss", ["look_up", "tools", "boss"]),
        ("boss", ["model", "boss"]),
    ],
    "react.py:solve_async": [
        ("boss", ["model", "boss"]),
        ("boss", ["look_up", "tools", "boss"]),
        ("boss", ["model", "boss"]),
    ],
    "office.py:solve": [
        ("triage", ["triage"]),
        ("boss", ["boss"]),
        ("boss", ["look_up", "boss"]),
        ("boss", ["boss"]),
        ("clerk", ["clerk", "ask_clerk", "boss"]),
        ("boss", ["boss"]),
    ],
}
"""By agent, the role of each call and the spans around it, innermost first."""

ROOTED = "clients.py:solve_rooted"
UNNAMED = {"Agent workflow", "turn", "generation", "response"}
"""Spans of the OpenAI Agents SDK that are the same around every call."""


def say(prompt: str) -> str:
    """Call every tool that is offered, one after the other, then say the number."""
    n = re.findall(r"number (-?\d+)", prompt)[-1]
    offered = re.findall(r'{"name": "(\w+)", "description"', prompt)
    called = re.findall(r'<tool_call>\n{"name": "(\w+)"', prompt)
    arguments = {
        "look_up": {"n": int(n)},
        "clerk": {"task": f"Say number {n}"},
        "ask_clerk": {"input": f"Say number {n}"},
        "transfer_to_boss": {},
    }
    for name in offered:
        if name not in called:
            return call(name, json.dumps(arguments[name])) + END
    return n + END


async def episode_of(harness: WorkerHarness, group: str) -> Episode:
    """Wait for a group of one: frameworks take long to import where others compute."""
    (episode,) = await harness.episodes(group, timeout_s=300)
    return episode


def around(episode: Episode, call: Call) -> list[Span]:
    """The spans around a call, innermost first; the attempt itself is around the last."""
    spans = {span.span_id: span for span in episode.spans}
    found, id = list[Span](), call.span
    while id in spans:
        found.append(spans[id])
        id = spans[id].parent_id
    return found


def paths(episode: Episode) -> list[tuple[str | None, list[str]]]:
    return [
        (episode.role(c), [span.name for span in around(episode, c) if span.name not in UNNAMED]) for c in episode.calls
    ]


def said(episode: Episode) -> set[str]:
    """What the model said, where it called no tool, and where it did, of which number."""
    words = (json.dumps(c.response) for c in episode.calls)
    return {number for text in words for number in re.findall(r'(?:"content": "|number |\\"n\\":)(-?\d+)', text)}


@pytest.mark.slow  # the next test checks the same of all agents in one process, which imports every framework once
@pytest.mark.parametrize("agent", CALLS)
async def test_a_trace_reads_from_agent_to_tool_to_call(harness: WorkerHarness, agent: str) -> None:
    await harness.open()
    harness.server.say = say
    for n in range(4):
        await harness.queue(f"g{n}", {"n": n})
    with harness.worker(agent):
        found = [await episode_of(harness, f"g{n}") for n in range(4)]
    for n, episode in enumerate(found):
        assert episode.final_reward(-1.0) == n, episode.attempt.outcome
        assert paths(episode) == CALLS[agent]
        assert said(episode) == {f"{n}"}
        assert {span.trace_id for span in episode.spans} == {trace_id(episode.attempt.id)}
        assert episode.output == ""


@pytest.mark.parametrize("rollouts", [48, pytest.param(200, marks=pytest.mark.slow)])
async def test_rollouts_of_all_frameworks_in_one_process_keep_apart(harness: WorkerHarness, rollouts: int) -> None:
    await harness.open()
    harness.server.say = say
    agents = [*CALLS, ROOTED]
    tasks = [{"n": n, "of": rollouts, "agent": agents[n % len(agents)]} for n in range(rollouts)]
    await asyncio.gather(*(harness.queue(f"g{task['n']}", task) for task in tasks))
    with harness.worker("mixed.py:solve", concurrency=rollouts):
        for n in range(rollouts):
            episode = await episode_of(harness, f"g{n}")
            assert episode.final_reward(-1.0) == n, episode.attempt.outcome
            assert paths(episode) == CALLS.get(agents[n % len(agents)], [(None, ["root"])])
            assert said(episode) == {f"{n}"}
            if tasks[n]["agent"] != ROOTED:
                assert {span.trace_id for span in episode.spans} == {trace_id(episode.attempt.id)}
            assert episode.output == ""


async def test_the_nodes_of_a_langgraph_are_roles(harness: WorkerHarness) -> None:
    await harness.open()
    for n in range(16):
        await harness.queue(f"g{n}", {"n": n, "async": n % 2})
    with harness.worker("graph.py:solve"):
        found = [(n, await episode_of(harness, f"g{n}")) for n in range(16)]
    for n, episode in found:
        assert [c.response["content"] for c in episode.calls] == [f"{n}", f"{n + 1}"], episode.attempt.outcome
        look = [] if n % 2 else ["look"]
        assert paths(episode) == [("planner", ["planner", "LangGraph"]), ("actor", [*look, "actor", "LangGraph"])]
        if look:
            (given,) = [reward for reward in episode.rewards if reward.kind == "step"]
            assert (given.call, given.value, given.name) == (episode.calls[0].id, 0.25, "planned")


async def test_a_framework_that_is_imported_late_has_spans_too(harness: WorkerHarness) -> None:
    await harness.open()
    harness.server.say = lambda text: call("transfer_to_adder", "{}") + END if "Hand it over." in text else echo(text)
    await harness.queue("g", {"n": 5})
    with harness.worker("handing.py:solve"):
        episode = await episode_of(harness, "g")
    assert episode.final_reward(0.0) == 5.0, episode.attempt.outcome
    assert paths(episode) == [("triage", ["triage"]), ("adder", ["adder"])]
    assert any("handoff" in span.name for span in episode.spans)
