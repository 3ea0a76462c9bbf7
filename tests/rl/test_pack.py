"""Parts hold every sequence once, are small enough, and cost as little as can be."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.rl.pack import Cost, merge_prefixes, pack
from leyden.rl.tree import build_tree, lexicographic_order

SEQUENCES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple), min_size=1, max_size=8)
COSTS = st.builds(Cost, st.integers(1, 30), st.sampled_from([0.0, 3.0]))
Sequences = list[tuple[int, ...]]


def price(sequences: Sequences, parts: list[list[int]], cost: Cost) -> float:
    sizes = [len(build_tree([sequences[index] for index in part]).ids) for part in parts]
    if any(size > cost.max_tokens and len(part) > 1 for size, part in zip(sizes, parts, strict=True)):
        return float("inf")
    return sum(cost.overhead + size for size in sizes)


def all_cuts(sequences: Sequences) -> list[list[list[int]]]:
    first, *others = lexicographic_order(sequences)
    ways = []
    for cuts in product((False, True), repeat=len(others)):
        parts = [[first]]
        for index, cut in zip(others, cuts, strict=True):
            parts = [*parts, [index]] if cut else [*parts[:-1], [*parts[-1], index]]
        ways.append(parts)
    return ways


@given(SEQUENCES, COSTS)
def test_of_all_ways_to_cut_the_cheapest_is_taken(sequences: Sequences, cost: Cost) -> None:
    packed = pack(sequences, cost)
    parts = [part.indices for part in packed]
    assert sorted(index for part in parts for index in part) == list(range(len(sequences)))
    assert [part.tokens for part in packed] == [len(build_tree([sequences[i] for i in part]).ids) for part in parts]
    assert price(sequences, parts, cost) == pytest.approx(min(price(sequences, w, cost) for w in all_cuts(sequences)))


def test_a_tree_is_cut_where_the_least_is_shared() -> None:
    sequences = [(1, 1, 1, 1), (2, 2, 2, 2), (1, 1, 1, 5), (2, 2, 2, 6)]
    assert [sorted(part.indices) for part in pack(sequences, Cost(5))] == [[0, 2], [1, 3]]


def test_small_trees_lie_together_where_starting_a_batch_costs_something() -> None:
    sequences = [(n, n, n) for n in range(10)]
    assert len(pack(sequences, Cost(12, overhead=1))) == 3  # four in each
    assert pack([], Cost(12)) == []


@given(SEQUENCES)
def test_a_line_holds_every_sequence_that_it_begins_with(sequences: Sequences) -> None:
    homes = merge_prefixes(sequences)
    assert sorted(index for home in homes for index in home) == list(range(len(sequences)))
    for first, *others in homes:
        assert all(sequences[first][: len(sequences[index])] == sequences[index] for index in others)
    wholes = [sequences[first] for first, *_ in homes]
    assert not any(a != b and a == b[: len(a)] for a in wholes for b in wholes)  # none lies in another
    assert len(set(wholes)) == len(wholes)
