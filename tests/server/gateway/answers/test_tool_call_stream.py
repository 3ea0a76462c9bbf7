"""Tool calls that are still being written."""

import time

from leyden.server.gateway.answers.tool_call_stream import read_call_text

HEAD = '{"name": "f", "arguments": '


def test_arguments_are_read_until_they_are_closed() -> None:
    for written in ('{"a": "}\\""', '{"a": [{}', '{"a": "\\', '{"a": "\\"\\'):
        read = read_call_text(HEAD + written)
        assert read is not None and (read.arguments, read.complete) == (written, False)
    whole = read_call_text(HEAD + '{"a": "}\\"]"}}')
    assert whole is not None and (whole.arguments, whole.complete) == ('{"a": "}\\"]"}', True)


def test_a_long_text_of_escapes_is_read_in_linear_time() -> None:
    started = time.thread_time()
    for text in ('"' + '\\"' * 200_000 + "\\", "\\" * 400_000, '"' * 400_000, '"\\' * 200_000):
        assert read_call_text(HEAD + "{" + text) is not None
    assert time.thread_time() - started < 5
