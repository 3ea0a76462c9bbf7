"""A tree holds every sequence, shares every prefix, and its intervals are its ancestors."""

from hypothesis import given
from hypothesis import strategies as st

from leyden.rl.tree import build_tree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8).map(tuple), max_size=12)


@given(SEQUENCES)
def test_a_tree_is_the_set_of_prefixes_and_paths_read_back(sequences: list[tuple[int, ...]]) -> None:
    tree = build_tree(sequences)
    prefixes = {sequence[: length + 1] for sequence in sequences for length in range(len(sequence))}
    assert len(tree.ids) == len(prefixes)
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tuple(tree.ids[path]) == sequence
        assert list(tree.depths[path]) == list(range(len(sequence)))
        for node in path:
            ancestors = [j for j in range(len(tree.ids)) if j <= node < tree.ends[j]]
            assert ancestors == list(path[: tree.depths[node] + 1])
