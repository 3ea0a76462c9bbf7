"""How results are printed."""

from pathlib import Path

from leyden.local.evaluate import EvaluatedModel
from leyden.local.readable import Readable


class Result(Readable, frozen=True):
    step: int
    best_error: float
    outcomes: dict[str, int]
    after: float | None = None


def test_a_result_prints_a_line_for_each_field_that_says_something() -> None:
    printed = str(Result(3, 0.123456, {"succeeded": 2, "timeout": 1}))
    assert printed == "step        3\nbest error  0.1235\noutcomes    succeeded 2, timeout 1"


def test_an_evaluation_is_printed_so() -> None:
    printed = str(EvaluatedModel("calc", "spark", 2, 0.5, None, 4, {"succeeded": 4}, Path("runs/calc"), 1.25))
    assert printed.splitlines()[3:5] == ["reward    0.5", "counted   4"]
