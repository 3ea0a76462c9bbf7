"""The error texts of frameworks are recognised; texts that only resemble them are not."""

import time

import pytest

from leyden.rl.signals.tool_results import failed

TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\nZeroDivisionError: by zero\n'
)

FAILED = {
    "langgraph": "Error: ValueError('nothing can be divided by zero')\n Please fix your mistakes.",
    "langgraph, arguments": "Error invoking tool 'divide' with kwargs {} with error:\n a: Field required\n"
    " Please fix the error and try again.",
    "langgraph, tool": "Error: multiply is not a valid tool, try one of [divide].",
    "langchain": "multiply is not a valid tool, try one of [divide].",
    "openai agents": "An error occurred while running the tool. Please try again.",
    "openai agents, before": "An error occurred while running the tool. Please try again. Error: by zero",
    "openai agents, time": "Tool 'divide' timed out after 5 seconds.",
    "openai agents, tool": "Tool 'multiply' not found.",
    "autogen, tool": "Error: tool 'multiply' not found in any workbench",
    "autogen, arguments": "1 validation error for divideargs\na\n  Input should be a valid integer",
    "mcp": "Error executing tool divide: nothing can be divided by zero",
    "mcp, tool": "Unknown tool: multiply",
    "mcp, arguments": "Input validation error: 'b' is a required property",
    "mcp, object": '{"content": [{"type": "text", "text": "by zero"}], "isError": true}',
    "crewai": "\nI encountered an error while trying to use the tool. This was the error: by zero.\n Tool divide ...",
    "llamaindex": "Encountered error: by zero",
    "pydantic ai": "1 validation error:\n```json\n[]\n```\n\nFix the errors and try again.",
    "smolagents": "Error:\nby zero\nNow let's retry: take care not to repeat previous errors!",
    "by hand": "Error: No such file or directory",
    "by hand, http": "Error: 404 Client Error: Not Found",
    "by hand, type": "ValueError: nothing can be divided by zero",
    "by hand, module": "requests.exceptions.ConnectionError: refused",
    "by hand, repr": "ValueError('nothing can be divided by zero')",
    "by hand, traceback": TRACEBACK,
    "by hand, xml": "<tool_use_error>String not found</tool_use_error>",
    "json": '{"error": "nothing can be divided by zero"}',
    "json, more": '{"success": false, "error": {"code": 3, "message": "by zero"}, "result": null}',
    "json, status": '{"status": "error", "message": "by zero"}',
    "json, flag": '{"error": true, "message": "by zero"}',
    "json, text": '"Error: by zero"',
}

DOUBTFUL = [
    '[{"error": "in a list of log lines"}]',
    "The Error: a novel",
    "Error bars: 0.3",
    "ERROR: root: disk full\nINFO: all well",
    "Error: 0.3",
    "error: 3 mm",
    "Failed tests: none",
    "Invalid entries were removed.",
    "Could not have been better, says the critic.",
    '{"error": "±0.3", "mean": 4.2}',
    '{"success": false, "guess": "cold"}',
    '{"status": "error", "service": "mail"}',
    "Traceback (most recent call last): what it means and how to read it",
]

WELL = [
    "",
    "3",
    "no errors found",
    "0 errors, 0 warnings",
    "There was an error in the report of 1998.",
    "The tool not found in any shop is the best.",
    "ValueErrors are raised by int().",
    '{"error": null, "result": 3}',
    '{"error": "", "errors": []}',
    '{"error": 0.3}',
    '{"a": ',
]


@pytest.mark.parametrize("text", FAILED.values(), ids=FAILED.keys())
def test_error_texts_of_frameworks_and_people_are_failures(text: str) -> None:
    assert failed(text) is True


@pytest.mark.parametrize("text", DOUBTFUL)
def test_a_text_that_only_resembles_an_error_is_neither_a_failure_nor_a_success(text: str) -> None:
    assert failed(text) is None


@pytest.mark.parametrize("text", WELL)
def test_any_other_text_is_a_success(text: str) -> None:
    assert failed(text) is False


@pytest.mark.parametrize(
    "text",
    [
        "Error" * 200_000,
        "A." * 500_000,
        "Traceback (most recent call last):\n" + "x \n" * 300_000,
        "Traceback (most recent call last):\n x\n" + "Error." * 100_000,
        "Traceback (most recent call last):\n" + "\nError " * 100_000 + "\n!",
        "ValueError(" + ") " * 200_000 + "x",
        "<error>" + "</error> " * 50_000 + "x",
        " " * 500_000 + "x",
    ],
    ids=lambda text: text.strip()[:10] + text[-10:].strip(),
)
def test_a_long_result_is_checked_in_linear_time(text: str) -> None:
    started = time.thread_time()
    failed(text)
    assert time.thread_time() - started < 5
