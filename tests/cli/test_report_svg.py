"""Charts of a report: axes with round numbers, whatever the size of the values."""

import re

import pytest

from leyden.cli.report.page import Line, draw, ticks


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [(0, 1, [0, 0.5, 1]), (0.27, 0.9, [0.4, 0.6, 0.8]), (0, 97, [0, 50]), (-3, 3, [-2, 0, 2])],
)
def test_ticks_are_round_numbers(low: float, high: float, found: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(found)


def test_small_values_have_ticks_too() -> None:
    text = draw([Line("kl", [1, 2, 3], [2e-13, 7e-13, 3e-13])])
    assert re.findall(r'text-anchor="end">([^<s]+)<', text) == ["2e-13", "4e-13", "6e-13"]


def test_a_line_that_is_always_0_is_at_the_bottom_and_names_are_escaped() -> None:
    text = draw([Line("<b>", [0, 1], [0.0, 0.0], [0.0, 0.1])])
    assert "&lt;b&gt;" in text and "<b>" not in text
    flat = draw([Line("zero", [0, 1], [0.0, 0.0])])
    assert re.findall(r'text-anchor="end">([^<s]+)<', flat) == ["0", "0.5", "1"]
    assert draw([]) == ""
