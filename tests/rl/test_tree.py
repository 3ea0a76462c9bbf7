"""A tree holds every sequence, shares every prefix, and its intervals are its ancestors."""

from hypothesis import given
from hypothesis import strategies as st

from leyden.rl.tree import divide, grow

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8).map(tuple), max_size=12)


@given(SEQUENCES)
def test_a_tree_is_the_set_of_prefixes_and_paths_read_back(sequences: list[tuple[int, ...]]) -> None:
    tree = grow(sequences)
    prefixes = {sequence[: length + 1] for sequence in sequences for length in range(len(sequence))}
    assert len(tree.ids) == len(prefixes)
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tuple(tree.ids[path]) == sequence
        assert list(tree.depths[path]) == list(range(len(sequence)))
        for node in path:
            ancestors = [j for j in range(len(tree.ids)) if j <= node < tree.ends[j]]
            assert ancestors == list(path[: tree.depths[node] + 1])


@given(SEQUENCES, st.integers(1, 30))
def test_divided_trees_hold_every_sequence_once_and_are_small_enough(
    sequences: list[tuple[int, ...]], most: int
) -> None:
    groups = list(divide(sequences, most, square=1e9))
    assert sorted(index for group in groups for index in group) == list(range(len(sequences)))
    for group in groups:
        size = len(grow([sequences[index] for index in group]).ids)
        assert size <= most or len(group) == 1


def test_a_tree_is_cut_where_the_least_is_shared() -> None:
    sequences = [(1, 1, 1, 1), (2, 2, 2, 2), (1, 1, 1, 5), (2, 2, 2, 6)]
    assert [sorted(group) for group in divide(sequences, 5, 1e9)] == [[0, 2], [1, 3]]


def test_a_tree_is_cut_too_where_attention_costs_more_than_sharing_saves() -> None:
    sequences = [(9, *(1,) * 50), (9, *(2,) * 50)]
    assert len(list(divide(sequences, 1000, square=1e9))) == 1
    assert len(list(divide(sequences, 1000, square=10))) == 2
