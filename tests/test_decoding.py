"""Foreign bytes become text or JSON, or one kind of error."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.decoding import NotJson, decode_json, decode_text


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'"caf\xe9"', "caf�"),
        (b'{"a\xff": "\xed\xa0\x80"}', {"a�": "���"}),
        (rb'"x\udce9y"', "x�y"),
        (rb'"\ud83d\ude00 \\udce9"', "\N{GRINNING FACE} \\udce9"),
        (rb'"\ud83d"', "�"),
        (b"[1, 2]", [1, 2]),
    ],
)
def test_bytes_that_are_no_text_are_replaced(data: bytes, value: Any) -> None:
    assert decode_json(data) == value


@pytest.mark.parametrize("data", [b"\xff", b"", b"[" * 100_000, b"NaN", b"1e999", b'"\xff'])
def test_what_is_not_json_is_one_error(data: bytes) -> None:
    with pytest.raises(NotJson):
        decode_json(data)


def test_a_document_of_another_type_is_the_same_error() -> None:
    with pytest.raises(NotJson, match="Expected `object`"):
        decode_json(b"[]", dict[str, Any])


@given(st.binary())
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    decode_text(data).encode()
    for candidate in (data, b'"' + data.replace(b'"', b"") + b'"'):
        with suppress(NotJson):
            str(decode_json(candidate)).encode()
