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


def doubled(levels: int) -> dict[str, Any]:
    """A schema each of whose parts refers to the next one twice."""
    parts = {f"p{at}": {"allOf": [{"$ref": f"#/$defs/p{at + 1}"}] * 2} for at in range(levels)}
    return {"$defs": {**parts, f"p{levels}": {"required": ["n"]}}, "$ref": "#/$defs/p0"}


def test_a_schema_that_takes_long_is_not_checked_any_further() -> None:
    assert violation({}, doubled(3)) is not None
    started = time.thread_time()
    many = {"items": {"allOf": [{"type": "integer"}] * 2000}}
    large = {"properties": {f"p{number}": {"type": "integer"} for number in range(20_000)}, "required": ["n"]}
    for schema in (doubled(60), {**doubled(60), "unevaluatedProperties": False}, {"properties": {"q": many}}, large):
        assert violation({"q": list(range(5000))}, schema) is None
    assert time.thread_time() - started < 10
    assert violation({}, doubled(3)) is not None  # the next call is checked from the beginning


def test_arguments_follow_a_schema_only_as_an_object() -> None:
    schema = {"type": "object", "required": ["a"]}
    assert follows('{"a": 1}', schema) and follows("{}", None)
    assert not follows("{}", schema) and not follows("[1]", schema) and not follows("{", schema)
