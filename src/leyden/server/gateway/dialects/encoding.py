"""Decodes JSON request bodies and encodes server-sent events, for all dialects."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from leyden.records import Sampling
from leyden.server.gateway.errors import invalid

T = TypeVar("T")


def decode_body(
    data: bytes, wanted: type[T], *, dotted: bool = False, normalise: Callable[[Any], Any] | None = None
) -> tuple[T, dict[str, Any]]:
    """Decode a JSON body into a type and into a plain document; `normalise` prepares that for the type.

    An error names the field to change, as `messages[0].role` or, `dotted`, as `messages.0.role`.
    """
    try:
        document = msgspec.json.decode(data)
        return msgspec.convert(normalise(document) if normalise else document, wanted), document
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        field = path.rstrip("`")
        if dotted:
            field = re.sub(r"\[(\d+)\]", r".\1", field)
        raise invalid(message, field or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from error


def sampling_of(request: Struct, max_tokens: int | None, stop: Sequence[str] | None = None) -> Sampling:
    """Return the sampling that a request wants by its fields that have the names of `Sampling`'s."""
    names = [name for name in Sampling.__struct_fields__ if name not in ("max_tokens", "stop")]
    given = {name: value for name in names if (value := getattr(request, name, None)) is not None}
    if given.get("top_k") == -1:  # how vLLM writes that all tokens are candidates
        given["top_k"] = 0
    return Sampling(**given, max_tokens=max_tokens, stop=tuple(text for text in stop or () if text))


def given_of(document: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Return which of these parameters a request gives, and not as null or empty."""
    return tuple(name for name in names if document.get(name))


def sse_event(data: bytes, name: str | None = None) -> bytes:
    """Encode one server-sent event."""
    head = b"event: " + name.encode() + b"\n" if name is not None else b""
    return head + b"data: " + data + b"\n\n"
