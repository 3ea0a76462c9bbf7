"""The arguments of tool calls and their schemas."""

import time
from typing import Any

import pytest

from leyden.rl.signals.schemas import CheckTime, SchemaCheck, check, check_text


def checked(arguments: dict[str, Any], schema: Any) -> SchemaCheck:
    return check(arguments, schema, CheckTime(60))


def violation(arguments: dict[str, Any], schema: Any) -> str | None:
    return checked(arguments, schema).error


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
    [
        (r"^(a+)+$", "a" * 5000 + "!"),
        (r"^(a|aa)*$", "a" * 5000 + "!"),
        (r"a*a*a*a*a*b", "a" * 5000),
        ("^" + "(a|a)" * 40 + "$", "a" * 40 + "b"),
    ],
)
def test_patterns_that_backtrack_are_checked_in_linear_time(pattern: str, text: str) -> None:
    started = time.thread_time()
    assert "does not match" in (violation({"q": text}, text_schema(pattern)) or "")
    named = {"patternProperties": {pattern: {"type": "string"}}, "additionalProperties": False}
    assert "not allowed" in (violation({text: "x"}, named) or "")
    assert time.thread_time() - started < 5


@pytest.mark.parametrize("pattern", ["^(?=a)" + "(a|a)" * 40 + "$", r"^(a)\1+$", "^(.{900}){900}$"])
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_unknown_and_the_rest_is_checked(pattern: str) -> None:
    schema = text_schema(pattern)
    assert checked({"q": "a" * 40 + "b"}, schema).result == "unchecked"
    assert pattern[:20] in (checked({"q": "b"}, schema).unchecked or "").replace("\\\\", "\\")
    assert "'n'" in (violation({"q": "b"}, {**schema, "required": ["n"]}) or "")
    named = {"patternProperties": {pattern: {"type": "string"}}, "additionalProperties": False}
    assert checked({"b": 1}, named).result == "unchecked"
    for turned in ({"not": schema}, {"oneOf": [schema, {}]}, {"if": schema, "then": False}):
        assert checked({"q": "b"}, turned).result == "unchecked"


def test_items_are_unique_by_json_and_in_linear_time() -> None:
    schema = {"properties": {"q": {"uniqueItems": True}}}
    for different in ([1, True], [[1], [True]], [{"a": 1}, {"a": "1"}], ["1", 1], [0, False]):
        assert violation({"q": different}, schema) is None
    for equal in ([1, 1.0], [{"a": 1, "b": 2}, {"b": 2.0, "a": 1}], [[], []]):
        assert violation({"q": equal}, schema) is not None
    started = time.thread_time()
    assert violation({"q": [{"a": number} for number in range(9000)]}, schema) is None
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


def test_a_schema_of_another_kind_is_unknown_and_nothing_is_fetched() -> None:
    for schema in (
        {"$ref": "http://127.0.0.1:9/x"},
        {"$schema": "http://json-schema.org/draft-03/schema#", "required": ["n"]},
        {"properties": {"q": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "a"}}},
        {"type": 5},
        {"$ref": "#"},
    ):
        assert checked({}, schema).result == "unchecked"
    assert checked({}, {"$schema": "http://127.0.0.1:9/x", "required": ["n"]}).result == "invalid"


def test_several_checks_share_their_time() -> None:
    allowed = CheckTime(0.0)
    assert check({}, {"required": ["n"]}, allowed).result == "unchecked"
    assert check({}, 5, allowed).result == "valid"


def test_arguments_follow_a_schema_only_as_an_object() -> None:
    schema = {"type": "object", "required": ["a"]}
    results = [check_text(text, schema, CheckTime(60)).result for text in ('{"a": 1}', "{}", "[1]", "{")]
    assert results == ["valid", "invalid", "invalid", "invalid"]
    assert check_text("{}", None, CheckTime(60)).result == "valid"
