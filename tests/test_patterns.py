"""Regular expressions of agents and of runs."""

import time

import pytest

from leyden.patterns import PatternError, applies, check_rule, contains


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"^\d{4}-\d{2}$", "2026-01", "2026-01\n"),
        (r"^\w+@[\w.]+$", "someone@example.org", "someone"),
        (r"\u0061|\p{Lu}", "É", "é"),
        (r"^(?i)you are", "YOU ARE", "are you"),
    ],
)
def test_an_expression_is_searched_as_in_json_schemas(pattern: str, matching: str, other: str) -> None:
    assert contains(pattern, matching) and not contains(pattern, other)
    assert applies(pattern, matching) and not applies(pattern, other)


@pytest.mark.parametrize(
    "pattern", ["(?=a)b", "(?<!a)b", r"(a)\1", "(", "(a{1000}){1000}", "a" * 600], ids=lambda pattern: pattern[:20]
)
def test_what_needs_backtracking_or_is_too_large_is_an_error(pattern: str) -> None:
    for use in (lambda: contains(pattern, "a"), lambda: applies(pattern, "a"), lambda: check_rule(pattern)):
        with pytest.raises(PatternError):
            use()


def test_expressions_that_backtrack_take_linear_time() -> None:
    started = time.thread_time()
    assert not contains("^" + "(a|a)" * 40 + "$", "a" * 40 + "b")
    assert not contains("^(a+)+$", "a" * 60_000 + "b")
    assert not applies("You.*are.*a.*critic", "You are a" * 1_000_000)
    assert not applies("(x+x+)+y", "x" * 1_000_000)
    with pytest.raises(PatternError):
        contains("[ab]*a[ab]{500}c", "ab" * 30_000)  # linear, but in the product of both lengths
    assert time.thread_time() - started < 5


def test_a_rule_reads_the_beginning_of_a_text_and_an_expression_the_whole() -> None:
    assert applies("critic", "a critic" + " " * 1_000_000) and not applies("critic", " " * 1_000_000 + "critic")
    with pytest.raises(PatternError, match="1000008 characters"):
        contains("critic", "a critic" + " " * 1_000_000)
