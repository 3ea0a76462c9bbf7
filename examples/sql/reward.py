"""The reward: 1 where a query gives the same result as the gold query, 0 where it does not.

The order of rows counts only where the gold query orders them, duplicate rows count, and columns may be in any order.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from execution import QueryError, Rows, execute

GOLD_LIMIT_S = 60.0
LITERALS = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
INNERMOST = re.compile(r"\([^()]*\)")
Row = tuple[Any, ...]


def reward(task: dict[str, Any], result: str) -> float:
    """Execution match with the gold query on the task's database."""
    gold = gold_rows(task["database"], task["query"])
    try:
        found = execute(task["database"], result)
    except QueryError:
        return 0.0
    return float(same_result(gold.rows, found.rows, ordered=is_ordered(task["query"])))


@lru_cache(maxsize=4096)
def gold_rows(database: str, query: str) -> Rows:
    """Return the gold result. A gold query that fails is an error of the data, and no zero."""
    return execute(database, query, limit_s=GOLD_LIMIT_S)


def is_ordered(query: str) -> bool:
    """Whether the outermost SELECT has an ORDER BY."""
    query = LITERALS.sub("''", query)
    while (outer := INNERMOST.sub(" ", query)) != query:
        query = outer
    return re.search(r"\border\s+by\b", query, re.IGNORECASE) is not None


def same_result(gold: Sequence[Row], found: Sequence[Row], ordered: bool) -> bool:
    """Whether two results are equal under some order of their columns."""
    if len(gold) != len(found) or not gold:
        return len(gold) == len(found)
    if len(gold[0]) != len(found[0]):
        return False
    gold_columns, found_columns = columns_of(gold), columns_of(found)
    if ordered:
        return Counter(gold_columns) == Counter(found_columns)
    return _match(gold_columns, found_columns, [], [])


def columns_of(rows: Sequence[Row]) -> list[Row]:
    """Return a result by columns, with floats rounded as far as the order of a sum may change them."""
    return [tuple(map(_rounded, column)) for column in zip(*rows, strict=True)]


def _rounded(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) else value


def _match(gold: Sequence[Row], rest: Sequence[Row], gold_taken: list[Row], taken: list[Row]) -> bool:
    """Assign the remaining columns to gold columns, one after another, so that the rows are equal as multisets."""
    if len(gold_taken) == len(gold):
        return True
    gold_taken = [*gold_taken, gold[len(gold_taken)]]
    wanted = Counter(zip(*gold_taken, strict=True))
    for column in dict.fromkeys(rest):
        chosen = [*taken, column]
        if Counter(zip(*chosen, strict=True)) == wanted:
            left = list(rest)
            left.remove(column)
            if _match(gold, left, gold_taken, chosen):
                return True
    return False
