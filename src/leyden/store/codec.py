"""Encodes arrays and JSON documents as bytes: arrays little-endian, token ids in 1, 2 or 4 bytes each."""

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from leyden.store.errors import NotStorable

_GUARD = 32
_SHALLOW = 500  # with no more brackets than these, a document cannot be nested too deep
_CODES = {1: "B", 2: "H", 4: "I"}  # bytes an element -> array type code

_encode = msgspec.json.Encoder().encode
decode_json = msgspec.json.Decoder().decode


def encode_json(document: Any) -> bytes:
    """Encode a document as JSON; raise `NotStorable` if JSON cannot represent it or it is nested too deep."""
    try:
        data = _encode(document)
        if data.count(b"[") + data.count(b"{") > _SHALLOW:
            _encode(_wrap(document))
    except (TypeError, ValueError, RecursionError) as error:
        raise NotStorable(f"this cannot be stored as JSON: {error}") from error
    return data


def _wrap(document: Any) -> Any:
    """Nest a document in lists: if this can be encoded, so can any response that contains the document."""
    for _ in range(_GUARD):
        document = [document]
    return document


def pack_ids(ids: Sequence[int]) -> bytes:
    """Encode token ids: one byte for their width, then the ids."""
    if not ids:
        return b""
    top = max(ids)
    width = 1 if top < 2**8 else 2 if top < 2**16 else 4
    return bytes((width,)) + _little(array(_CODES[width], ids)).tobytes()


def unpack_ids(data: bytes) -> tuple[int, ...]:
    """Reverse `pack_ids`."""
    if not data:
        return ()
    ids = array(_CODES[data[0]])
    ids.frombytes(memoryview(data)[1:])
    return tuple(_little(ids))


def pack_floats(values: Sequence[float]) -> bytes:
    """Encode floats in single precision, which is what engines compute in."""
    return _little(array("f", values)).tobytes()


def unpack_floats(data: bytes) -> tuple[float, ...]:
    """Reverse `pack_floats`."""
    values = array("f")
    values.frombytes(data)
    return tuple(_little(values))


def _little(values: "array[Any]") -> "array[Any]":
    if sys.byteorder == "big":
        values.byteswap()
    return values
