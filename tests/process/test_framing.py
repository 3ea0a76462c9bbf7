"""Frames arrive whole or not at all, and the reader refuses one that is too large before it reads it."""

import asyncio
import io

import pytest

from leyden.process import framing
from leyden.process.framing import FrameTooLarge, read_frame, read_frame_blocking, to_frame


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def test_frames_are_read_one_by_one_until_the_stream_ends() -> None:
    data = to_frame(b"one") + to_frame(b"") + to_frame(b"three")
    reader, file = reader_of(data), io.BytesIO(data)
    for expected in (b"one", b"", b"three", None):
        assert await read_frame(reader) == expected
        assert read_frame_blocking(file) == expected


@pytest.mark.parametrize("kept", [2, 4, 6])
async def test_a_frame_that_breaks_off_is_the_end_of_the_stream(kept: int) -> None:
    data = to_frame(b"hello")[:kept]
    assert await read_frame(reader_of(data)) is None
    assert read_frame_blocking(io.BytesIO(data)) is None


async def test_a_frame_over_the_limit_is_refused_by_reader_and_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    data = to_frame(b"x" * 100)
    monkeypatch.setattr(framing, "MAX_FRAME", 99)
    with pytest.raises(FrameTooLarge):
        await read_frame(reader_of(data))
    with pytest.raises(FrameTooLarge):
        read_frame_blocking(io.BytesIO(data))
    with pytest.raises(FrameTooLarge, match="100 bytes"):
        to_frame(b"x" * 100)
