"""Calls, tool calls and cut calls of rollouts, counted by hand."""

from smallepisodes import call, episode

from leyden.orchestrator.rollouts.call_usage import CallUsage


def tool_call(name: str) -> dict[str, object]:
    return {"id": name, "function": {"name": "add", "arguments": "{}"}}


def test_calls_and_tool_calls_per_rollout_and_the_share_that_was_cut() -> None:
    two = call("a", response={"role": "assistant", "tool_calls": [tool_call("x"), tool_call("y")]}, finish="tool_calls")
    usage = CallUsage()
    usage.add(
        [episode(0, 1.0, [two, call("b", finish="length"), call("j", policy="judge", finish="length")])], "policy"
    )
    usage.add([episode(1, 0.0, [call("c", finish="length")]), episode(2, 0.0, [])], "policy")
    assert usage.metrics() == {"per_rollout": 3 / 3, "tool_calls_per_rollout": 2 / 3, "cut": 2 / 3}


def test_of_nothing_there_are_no_shares() -> None:
    usage = CallUsage()
    assert usage.metrics() == {}
    usage.add([episode(0, 1.0, [])], "policy")
    assert usage.metrics() == {"per_rollout": 0.0, "tool_calls_per_rollout": 0.0}
