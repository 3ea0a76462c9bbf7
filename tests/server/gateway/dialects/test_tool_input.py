"""The input of tool calls in the Messages API."""

import json

import pytest

from leyden.server.gateway.dialects.tool_input import ToolInput, input_of
from leyden.server.gateway.dialects.types import ToolCall

LONG = {"path": "/a, b", "text": 'a, "b" {' * 50, "deep": {"c": [1, {"d": 2}]}, "last": None}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (json.dumps(LONG), LONG),
        ("{}", {}),
        ("", {"INVALID_JSON": ""}),
        ("[1, 2]", {"INVALID_JSON": "[1, 2]"}),
        ('{"a": 1, "b": [2, 3], "c"', {"a": 1, "b": [2, 3], "INVALID_JSON": '{"a": 1, "b": [2, 3], "c"'}),
        ('{"a": 1, 2, "c": 3}', {"a": 1, "INVALID_JSON": '{"a": 1, 2, "c": 3}'}),
        ('{"a": 1]}, "b": 2}', {"INVALID_JSON": '{"a": 1]}, "b": 2}'}),
    ],
)
def test_what_is_streamed_adds_up_to_the_whole_input_and_ends_with_whole_properties(
    arguments: str, wanted: object, size: int
) -> None:
    written, sent = ToolInput(), ""
    for at in range(0, len(arguments), size):
        sent += written.feed(arguments[at : at + size])
        assert not sent or json.loads(sent + "}")
    assert json.loads(sent + written.finish()) == wanted
    assert input_of(ToolCall("c", "f", arguments)) == wanted
