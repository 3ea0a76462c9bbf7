"""Sequences with the longest common prefix are found first."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from leyden.engine.torch.sorted_sequences import SortedSequences, common_prefix_length

token_ids = st.lists(st.integers(0, 300).map(lambda id: id if id < 3 else 2**31 - id), max_size=6)


def test_common_prefix_lengths() -> None:
    assert common_prefix_length([], [1], 5) == 0
    assert common_prefix_length([1, 2, 3], [1, 2, 4], 5) == 2
    assert common_prefix_length(list(range(500)), list(range(400)), 1000) == 400
    assert common_prefix_length(list(range(500)), [*range(130), 0, *range(131, 500)], 1000) == 130
    assert common_prefix_length(list(range(500)), list(range(500)), 77) == 77


@given(st.lists(st.tuples(st.integers(0, 5), token_ids), max_size=20), token_ids)
def test_nearest_sequences_come_first(changes: list[tuple[int, list[int]]], wanted: list[int]) -> None:
    index, held = SortedSequences(), dict[int, list[int]]()
    for slot, tokens in changes:
        index.set(slot, array("i", tokens))
        held[slot] = tokens
    found = list(index.nearest(array("i", wanted)))
    shared = {slot: common_prefix_length(tokens, wanted, len(wanted)) for slot, tokens in held.items()}
    assert dict(found) == {slot: length for slot, length in shared.items() if length}
    assert [length for _, length in found] == sorted((length for _, length in found), reverse=True)


def test_later_tokens_of_a_request_are_not_part_of_its_sequence() -> None:
    index, tokens = SortedSequences(), array("i", [1, 2])
    index.set(0, tokens)
    tokens.append(3)
    assert list(index.nearest(array("i", [1, 2, 3]))) == [(0, 2)]
    index.set(0, array("i"))
    assert list(index.nearest(array("i", [1, 2, 3]))) == []
