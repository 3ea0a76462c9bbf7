"""Messages that a client sends again after a stored response."""

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from leyden.server.gateway.dialects.responses.stored import without_repeated

ANSWER: Any = {"role": "assistant", "content": "It is."}
CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def said(texts: str) -> list[Any]:
    return [{"role": "user", "content": text} for text in texts]


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_the_longest_end_of_the_conversation_that_is_sent_again_is_left_out(stored: str, sent: str) -> None:
    conversation = [*said(stored), ANSWER]
    longest = max(length for length in range(len(sent) + 1) if stored.endswith(sent[:length]))
    again = [*said(sent[:longest]), ANSWER]
    assert list(without_repeated(conversation, [*again, *said("new")])) == said("new")


def test_long_conversations_are_compared_in_linear_time() -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    for known, other in (("a", "b"), ("a", "a")):
        started = time.thread_time()
        stored, sent = [*said(known * 20_000), calling], [*said(other * 20_000), result]
        assert without_repeated(stored, sent)[-1] == result
        assert time.thread_time() - started < 5  # each end with each beginning took a quarter of a minute
