"""Decodes bytes that agents, upstreams and remote servers send. A byte that is not UTF-8 is replaced, never an error.

Everything that reads foreign bytes as text or JSON uses this module, so that one bad byte cannot change an outcome.
"""

import re
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_ESCAPE = re.compile(
    rb"\\[^u]|(?P<pair>\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


class NotJson(ValueError):
    """The bytes are not JSON, or not a document of the expected type."""


def decode_text(data: bytes | bytearray) -> str:
    """Decode UTF-8; other bytes become U+FFFD."""
    return data.decode(errors="replace")


@overload
def decode_json(data: bytes | bytearray) -> Any: ...
@overload
def decode_json(data: bytes | bytearray, type: type[T]) -> T: ...
def decode_json(data: bytes | bytearray, type: Any = Any) -> Any:
    """Decode JSON; bytes that are not UTF-8 and lone surrogates become U+FFFD. Raises `NotJson`."""
    try:
        try:
            return msgspec.json.decode(data, type=type)
        except msgspec.ValidationError:
            raise
        except (UnicodeDecodeError, msgspec.DecodeError):
            mended = _ESCAPE.sub(_without_lone_surrogate, decode_text(data).encode())
            if mended == data:
                raise
            return msgspec.json.decode(mended, type=type)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotJson(str(error)) from error


def decode_object(text: Any) -> dict[str, Any] | None:
    """Decode a text that is a JSON object; None if it is something else."""
    try:
        document = msgspec.json.decode(text) if isinstance(text, str) else None
    except (msgspec.DecodeError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _without_lone_surrogate(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape["lone"] else escape[0]
