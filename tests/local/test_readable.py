"""How results are printed."""

from msgspec import Struct

from leyden.local.readable import Readable


class Result(Readable, Struct, frozen=True):
    step: int
    best_error: float
    outcomes: dict[str, int]
    after: float | None = None


def test_a_result_prints_a_line_for_each_field_that_says_something() -> None:
    printed = str(Result(3, 0.123456, {"succeeded": 2, "timeout": 1}))
    assert printed == "step        3\nbest error  0.1235\noutcomes    succeeded 2, timeout 1"
