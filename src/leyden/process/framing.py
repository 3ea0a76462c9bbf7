"""Length-prefixed frames over a byte stream: four bytes of length, big-endian, followed by that many bytes.

Both ends keep to `MAX_FRAME`, so that a corrupt length cannot make the reader allocate gigabytes.
"""

import asyncio
from typing import BinaryIO

MAX_FRAME = 256 << 20
"""Bytes in one frame."""
_LENGTH = 4


class FrameTooLarge(ValueError):
    """A frame exceeds its limit: the sender's message is too large, or the stream is corrupt."""


def to_frame(body: bytes, limit: int | None = None) -> bytes:
    """Prefix a message with its length; by default it has at most `MAX_FRAME` bytes."""
    return _checked(len(body), limit).to_bytes(_LENGTH, "big") + body


async def read_frame(reader: asyncio.StreamReader, limit: int | None = None) -> bytes | None:
    """Read one frame, by default of at most `MAX_FRAME` bytes; None when the stream has ended or is lost."""
    try:
        length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
        return await reader.readexactly(_checked(length, limit))
    except (asyncio.IncompleteReadError, OSError):
        return None


def read_frame_blocking(file: BinaryIO, limit: int | None = None) -> bytes | None:
    """Read one frame from a file that blocks, by default of at most `MAX_FRAME` bytes.

    None when it has ended or the connection is lost.
    """
    try:
        header = file.read(_LENGTH)
        if len(header) < _LENGTH:
            return None
        length = _checked(int.from_bytes(header, "big"), limit)
        body = file.read(length)
    except OSError:
        return None
    return body if len(body) == length else None


def _checked(length: int, limit: int | None = None) -> int:
    limit = MAX_FRAME if limit is None else limit
    if length > limit:
        raise FrameTooLarge(f"a frame of {length} bytes: at most {limit} are allowed")
    return length
