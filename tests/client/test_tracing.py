"""Spans of real frameworks are with the server before their attempts end, joined with the calls; roles are found."""

import pytest
from modelserving import END, call
from worksite import Worksite, echo

from leyden.episodes import Episode
from leyden.outcomes import Ending
from leyden.records import Call, Span, trace_id


def around(episode: Episode, call: Call) -> list[Span]:
    """The spans around a call, innermost first; the attempt itself is around the last."""
    spans = {span.span_id: span for span in episode.spans}
    found, id = list[Span](), call.span
    while id in spans:
        found.append(spans[id])
        id = spans[id].parent_id
    return found


@pytest.mark.parametrize("agent", ["solve", "solve_async"])
async def test_the_nodes_of_a_langgraph_are_roles(site: Worksite, agent: str) -> None:
    await site.open()
    for n in range(8):
        await site.queue(f"g{n}", {"n": n})
    with site.worker(f"graph.py:{agent}"):
        found = [(n, await site.episode(f"g{n}")) for n in range(8)]
    for n, episode in found:
        assert [c.response["content"] for c in episode.calls] == [f"{n}", f"{n + 1}"], episode.attempt.outcome
        assert [episode.role(c) for c in episode.calls] == ["planner", "actor"]
        assert {span.trace_id for span in episode.spans} == {trace_id(episode.attempt.id)}
        look = ["look"] if agent == "solve" else []
        assert [[span.name for span in around(episode, c)] for c in episode.calls] == [
            ["planner", "LangGraph"],
            [*look, "actor", "LangGraph"],
        ]
        if look:
            (given,) = [reward for reward in episode.rewards if reward.kind == "step"]
            assert (given.call, given.value, given.name) == (episode.calls[0].id, 0.25, "planned")


async def test_agents_of_the_openai_sdk_are_roles_across_a_handoff(site: Worksite) -> None:
    await site.open()
    site.server.say = lambda text: call("transfer_to_adder", "{}") + END if "Hand it over." in text else echo(text)
    for n in range(8):
        await site.queue(f"g{n}", {"n": n})
    with site.worker("handing.py:solve"):
        found = [(n, await site.episode(f"g{n}")) for n in range(8)]
    for n, episode in found:
        assert episode.final_reward(0.0) == n, episode.attempt.outcome
        assert [episode.role(c) for c in episode.calls] == ["triage", "adder"]
        names = [[span.name for span in around(episode, c)] for c in episode.calls]
        assert [path[0] for path in names] == ["generation", "generation"]
        assert all(path[-1] == "Agent workflow" for path in names)
        assert any("handoff" in span.name for span in episode.spans)


@pytest.mark.parametrize("late", [False, True])
async def test_a_provider_of_the_agents_own_is_joined(
    site: Worksite, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        monkeypatch.setenv("LATE", "1")
    await site.open()
    await site.queue("g", {"name": "work"})
    with site.worker("own_provider.py:solve"):
        episode = await site.episode("g")
    assert episode.attempt.outcome and episode.attempt.outcome.ending is Ending.SUCCEEDED
    assert episode.final_reward(0.0) == 1.0  # its own exporter has the span
    assert [span.name for span in episode.spans] == ["work"]  # and so has the server
