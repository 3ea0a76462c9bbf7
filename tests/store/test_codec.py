"""Arrays and documents as bytes."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from leyden.store.codec import decode_json, encode_json, pack_floats, pack_ids, unpack_floats, unpack_ids
from leyden.store.errors import NotStorable


@given(st.lists(st.integers(0, 2**32 - 1)) | st.lists(st.integers(0, 300)))
def test_ids_come_back_as_they_were_and_take_no_more_room_than_they_need(ids: list[int]) -> None:
    data = pack_ids(ids)
    assert list(unpack_ids(data)) == ids
    width = 1 if max(ids, default=0) < 2**8 else 2 if max(ids) < 2**16 else 4
    assert len(data) == (1 + width * len(ids) if ids else 0)


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_single_precision_comes_back_exactly(values: list[float]) -> None:
    assert list(unpack_floats(pack_floats(values))) == values


def test_a_document_too_deep_to_be_shown_again_is_refused() -> None:
    def nested(depth: int) -> object:
        document: object = 0
        for _ in range(depth):
            document = [document]
        return document

    assert decode_json(encode_json({"x": nested(600)})) == {"x": nested(600)}
    refused = 0
    for depth in range(800, 1100, 4):
        try:
            kept = encode_json(nested(depth))
        except NotStorable:
            refused += 1
        else:
            msgspec.json.encode({"episode": {"attempt": {"result": decode_json(kept)}}})  # as an answer would hold it
    assert refused


@pytest.mark.parametrize("document", [{(1, 2): 3}, object(), {None: 1}])
def test_what_json_cannot_hold_is_refused(document: object) -> None:
    with pytest.raises(NotStorable):
        encode_json(document)
