"""Tool calls that a model writes as JSON without the marks of its template."""

import time

import pytest

from leyden.server.gateway.answers.unmarked_calls import find_unmarked_call, settled_length

CALL = '{"name": "search", "arguments": {"query": "a {b}"}}'
TOOLS = frozenset({"search"})


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (CALL, ""),
        (f"\n{CALL}\n", ""),
        (f"```json\n{CALL}\n```", ""),
        (f"```\n{CALL}```", ""),
        (f"I look it up:\n\n```json\n{CALL}\n```\n", "I look it up:"),
        (f"{{{CALL}}}", ""),  # in doubled braces
        (f"{{{CALL}}}\n```", ""),
        (f"So: <tool_call>\n{CALL}\n</tool_call>", "So:"),
        (f"```json\n{{}}\n```\n```json\n{CALL}\n```", "```json\n{}\n```"),
    ],
)
def test_a_call_that_ends_the_answer_is_found(answer: str, text: str) -> None:
    found = find_unmarked_call(answer, TOOLS)
    assert found is not None
    assert found.text == text
    assert (found.call.name, found.call.arguments) == ("search", {"query": "a {b}"})


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "{",
        "Nothing to call.",
        f"```json\n{CALL}\n```\nThat is how one searches.",  # it does not end the answer
        f"One writes {CALL}",  # inside a sentence
        CALL.replace("search", "rm"),
        CALL.replace('{"query": "a {b}"}', '"query"'),
        '{"name": ["search"], "arguments": {}}',
        f"[{CALL}]",
        "```json\n" + '{"a":' * 5_000,
    ],
)
def test_other_json_is_text(answer: str) -> None:
    assert find_unmarked_call(answer, TOOLS) is None


def test_white_space_after_a_call_is_read_once() -> None:
    started = time.thread_time()
    assert find_unmarked_call(f"{CALL}{' ' * 100_000}x", TOOLS) is None
    assert time.thread_time() - started < 5  # once for each of its characters, it took a minute


def test_text_before_a_possible_call_is_settled() -> None:
    assert settled_length("plain") == 5
    assert settled_length("see ```json") == 4
    assert settled_length(' {"na') == 0
    assert settled_length("so <tool_call>") == 3
