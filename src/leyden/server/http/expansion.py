"""Counts the values in a body before it is expanded into objects.

A megabyte can hold half a million empty messages or lists, each of which costs far more memory and time as an object
than as bytes. Counting stops at the limit, so its time is bounded too.
"""

from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor

MAX_VALUES = 250_000
"""Fields of a protobuf message, or strings and separators of a JSON document: thousands of spans or messages."""
MAX_UNCOUNTED_BYTES = MAX_VALUES
"""A body of this size cannot hold too many values."""
_MAX_DEPTH = 100
_STRUCTURE = (b"{", b"[", b",")


class TooManyValues(ValueError):
    """A body has more than `MAX_VALUES` values."""

    def __init__(self) -> None:
        super().__init__(f"the body has more than {MAX_VALUES} values: send it in parts")


def check_json(data: bytes) -> None:
    """Raise `TooManyValues` if a JSON document has too many. Commas and brackets within strings do not count."""
    data = data.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    if data.count(b'"') // 2 + _structure(data, 0, len(data)) <= MAX_VALUES:
        return
    count = at = 0
    while at < len(data):
        opening = data.find(b'"', at)
        end = len(data) if opening < 0 else opening
        count += _structure(data, at, end) + 1
        if count > MAX_VALUES:
            raise TooManyValues
        closing = data.find(b'"', end + 1)
        at = len(data) if closing < 0 else closing + 1


def _structure(data: bytes, start: int, end: int) -> int:
    return sum(data.count(mark, start, end) for mark in _STRUCTURE)


def check_protobuf(data: bytes, message: Descriptor) -> None:
    """Raise `TooManyValues` if a message has too many fields, nested ones included.

    Bytes that are no message end the count: the parser refuses them.
    """
    count = 0
    todo: list[tuple[int, int, Any, int]] = [(0, len(data), message, 0)]
    while todo:
        at, end, kind, depth = todo.pop()
        nested = _nested_messages(kind)
        while at < end:
            count += 1
            if count > MAX_VALUES:
                raise TooManyValues
            tag, at = _varint(data, at)
            match tag & 7:  # the wire type
                case 0:
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 2:
                    length, at = _varint(data, at)
                    inner = nested.get(tag >> 3)
                    if inner is not None and length and depth < _MAX_DEPTH:
                        todo.append((at, min(at + length, end), inner, depth + 1))
                    at += length
                case 5:
                    at += 4
                case _:
                    return


@cache
def _nested_messages(message: Descriptor) -> dict[int, Any]:
    return {number: field.message_type for number, field in message.fields_by_number.items() if field.message_type}


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return value, len(data)
