"""Runs the harnesses of the main environment, unmodified, and checks how extendable turns are counted."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import harness_list
import harness_traffic
import harnesses

ROOT = Path(__file__).parents[2]
SHORT = {
    ("openai (Python)", "chat"),
    ("openai (Python)", "completions"),
    ("openai (Python), time-out", "chat"),
    ("anthropic (Python)", "messages"),
    ("google-genai (Python), Qwen3", "google"),
    ("openai (Python), Qwen3", "responses"),
}
CELLS = [
    pytest.param(
        harness,
        dialect,
        stream,
        id=f"{harness.name}-{dialect}-{'streamed' if stream else 'whole'}",
        marks=[] if stream is harness.modes[-1] and (harness.name, dialect) in SHORT else [pytest.mark.slow],
    )
    for harness in harness_list.INSTALLED
    for dialect in harness.dialects
    for stream in harness.modes
]


@pytest.mark.parametrize(("harness", "dialect", "stream"), CELLS)
async def test_a_harness_is_captured_and_keeps_its_tokens(harness: Any, dialect: str, stream: bool) -> None:
    cell = await harnesses.run_cell(harness, dialect, stream, timeout_s=120, log=None)
    assert cell.ok, cell.why
    turns = 2 if dialect == "completions" else 4
    assert (cell.made, cell.captured, cell.extendable, cell.exact) == (turns, turns, turns - 1, turns - 1)


async def test_a_call_that_fails_once_is_retried_and_not_counted() -> None:
    harness = replace(harness_list.INSTALLED[0], fault="failure")
    cell = await harnesses.run_cell(harness, "chat", False, timeout_s=120, log=None)
    assert cell.ok, cell.why
    assert (cell.made, cell.captured, cell.extendable, cell.exact) == (4, 4, 3, 3)


async def test_a_harness_that_is_killed_in_the_middle_of_an_answer_is_run_again() -> None:
    harness = harness_list.INSTALLED[0]
    again = (*harness.command, "chat", "--stream")
    cell = await harnesses.run_cell(
        replace(harness, fault="abort", further=(again,)), "chat", True, timeout_s=120, log=None
    )
    assert cell.ok, cell.why
    assert (cell.made, cell.captured, cell.extendable, cell.exact) == (5, 5, 3, 3)


def exchange(number: int, *messages: Any, said: Any, tools: Any = ()) -> Any:
    body = json.dumps({"choices": [{"message": {"role": "assistant", **said}}]}).encode()
    request = {"messages": list(messages), "tools": list(tools)}
    return harness_traffic.Exchange("chat", request, 200, f"call-{number}", body, complete=True)


def test_only_a_turn_that_repeats_request_and_answer_is_extendable() -> None:
    ask, thanks = {"role": "user", "content": "2 + 3?"}, {"role": "user", "content": "Thanks"}
    function = {"name": "add", "arguments": '{"a": 2.0}'}
    called = {"content": "Let me.", "tool_calls": [{"function": function}]}
    again = {"role": "assistant", "tool_calls": [{"function": {**function, "arguments": '{"a": 2}'}}]}
    result = {"role": "tool", "content": "5"}
    first = exchange(0, ask, said=called)
    second = exchange(1, ask, again, result, said={"content": "5"})
    five = {"role": "assistant", "content": "5"}
    assert harness_traffic.extendable([first, second]) == {"call-1": ["call-0"]}
    third = exchange(2, ask, again, result, five, thanks, said={"content": "Bye"})
    assert harness_traffic.extendable([first, second, third])["call-2"] == ["call-1"]
    offered = exchange(3, ask, again, result, said={"content": "5"}, tools=[{"name": "late", "defer_loading": True}])
    assert harness_traffic.extendable([first, offered]) == {"call-3": ["call-0"]}
    others = [
        exchange(3, ask, {**again, "content": "Other words"}, result, said={"content": "5"}),
        exchange(3, {**ask, "content": "4?"}, again, result, said={"content": "5"}),
        exchange(3, ask, again, result, said={"content": "5"}, tools=[{"x": 1}]),
        exchange(3, ask, again, result, {**five, "content": "6"}, thanks, said={"content": "Bye"}),
    ]
    for other in others:
        assert harness_traffic.extendable([first, other]) == {}


def test_a_text_is_extendable_where_it_begins_with_prompt_and_completion() -> None:
    def completed(number: int, prompt: Any, text: str, **more: Any) -> Any:
        body = json.dumps({"choices": [{"text": text}]}).encode()
        request = {"prompt": prompt, **more}
        return harness_traffic.Exchange("completions", request, 200, f"call-{number}", body, complete=True)

    first = completed(0, "One,", " two")
    assert harness_traffic.extendable([first, completed(1, "One, two three", "")]) == {"call-1": ["call-0"]}
    for other in ("One, 2 three", "One, two", [1, 2]):
        assert harness_traffic.extendable([first, completed(1, other, "")]) == {}
    echoed = completed(0, "One,", "One, two", echo=True)
    assert harness_traffic.extendable([echoed, completed(1, "One,One, two three", "")]) == {}


def test_a_refused_call_counts_as_made_and_continues_nothing() -> None:
    ask = {"role": "user", "content": "2 + 3?"}
    refused = harness_traffic.Exchange("chat", {"messages": [ask]}, 400, None, b"{}", complete=True)
    aborted = harness_traffic.Exchange("chat", {"messages": [ask]}, 200, "call-0", b"data: {", complete=False)
    assert harness_traffic.Traffic(exchanges=[refused, aborted]).made == [refused]
    assert harness_traffic.extendable([refused]) == {}


@pytest.mark.parametrize(
    ("dialect", "event"),
    [
        ("chat", {"error": {"message": "the engine failed"}}),
        ("messages", {"type": "error", "error": {"type": "api_error"}}),
        ("responses", {"type": "response.failed", "response": {"output": []}}),
    ],
)
def test_a_stream_that_an_error_ended_counts_as_made_and_continues_nothing(dialect: str, event: Any) -> None:
    body = f"data: {json.dumps(event)}\n\n".encode()
    request = {"stream": True, "messages": [{"role": "user", "content": "2 + 3?"}]}
    failed = harness_traffic.Exchange(dialect, request, 200, "call-0", body, complete=True)
    assert harness_traffic.Traffic(exchanges=[failed]).made == [failed]
    assert failed.failed
    assert harness_traffic.extendable([failed]) == {}


def test_the_page_shows_the_last_run() -> None:
    result = json.loads((ROOT / "results" / "harnesses" / "benchmark.json").read_text())
    page = (ROOT / "docs" / "harnesses.md").read_text()
    assert harnesses.MARKS[0] + harnesses.table(result) + harnesses.MARKS[1] in page
