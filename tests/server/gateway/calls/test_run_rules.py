"""The rules of a run on model names and system prompts."""

import time

import pytest

from leyden.server.gateway.calls.run_rules import role_by_prompt, route_target


@pytest.mark.parametrize(
    ("pattern", "names", "others"),
    [
        ("*", ["", "a", "a\nb"], []),
        ("gpt-*", ["gpt-", "gpt-4o"], ["gpt", "a gpt-4o"]),
        ("*-mini", ["-mini", "o4-mini"], ["o4-mini-2"]),
        ("a*a", ["aa", "a-a"], ["a"]),
        ("a*b*b", ["abb", "a-b-b", "abbb"], ["ab", "a-b-"]),
        ("*x.*y*", ["x.y", "-x.-y-"], ["xzy", "yx."]),
        ("a**b", ["ab", "a-b"], ["a"]),
        ("[a]?*", ["[a]?", "[a]?b"], ["ab", "[a]b"]),
    ],
)
def test_a_star_in_a_route_stands_for_any_text(pattern: str, names: list[str], others: list[str]) -> None:
    routes = {"exact": "first", pattern: "found"}
    assert [route_target(name, routes) for name in names] == ["found"] * len(names)
    assert [route_target(name, routes) for name in others] == [None] * len(others)
    assert route_target("exact", routes) == "first"


def test_long_names_and_prompts_take_linear_time() -> None:
    started = time.thread_time()
    assert route_target("ab" * 500_000, {"*a*a*a*a*a*c": "found", "*c*": "found"}) is None
    prompt = [{"role": "system", "content": "You are a" * 500_000}]
    assert role_by_prompt(prompt, {"critic": "You.*are.*a.*critic", "writer": "(You |are |a)+writer"}) is None
    assert time.thread_time() - started < 5
