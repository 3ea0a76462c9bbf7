"""The arguments of tool calls and their schemas."""

import time
from typing import Any

import pytest

from leyden.rl.signals.schemas import follows, violation


def text_schema(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"q": {"type": "string", "pattern": pattern}}, **more}


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        (r"^\d{4}-\d{2}-\d{2}$", "2026-01-31", "31 January 2026, a Saturday"),
        (r"^[^@\s]+@[^@\s]+\.[a-z]+$", "someone@example.org", "someone at example.org"),
        (r"^([a-z]+\.)*[a-z]+$", "a.b.c", "a..b"),
    ],
)
def test_patterns_are_checked(pattern: str, valid: str, invalid: str) -> None:
    assert violation({"q": valid}, text_schema(pattern)) is None
    assert "does not match" in (violation({"q": invalid}, text_schema(pattern)) or "")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"^(a+)+$", "a" * 60 + "!"), (r"^(a|aa)*$", "a" * 60 + "!"), (r"a*a*a*a*a*b", "a" * 5000)],
)
def test_a_pattern_that_would_take_long_is_not_checked_and_the_rest_is(pattern: str, text: str) -> None:
    started = time.thread_time()
    assert violation({"q": text}, text_schema(pattern)) is None
    assert "'n'" in (violation({"q": text}, text_schema(pattern, required=["n"])) or "")
    named = {"patternProperties": {pattern: {"type": "string"}}, "additionalProperties": False}
    other = {"properties": {"q": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": pattern}}}
    assert violation({text: "x", "q": text}, named) is None and violation({"q": text}, other) is None
    assert time.thread_time() - started < 5


def test_arguments_follow_a_schema_only_as_an_object() -> None:
    schema = {"type": "object", "required": ["a"]}
    assert follows('{"a": 1}', schema) and follows("{}", None)
    assert not follows("{}", schema) and not follows("[1]", schema) and not follows("{", schema)
