"""Reads server-sent events: their data, without comments and event names."""

from collections.abc import AsyncIterator

_MAX_EVENT = 32 * 2**20


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each complete event; raise ValueError for one that is too large."""
    pending, data = b"", list[bytes]()
    async for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
        if len(pending) + sum(map(len, data)) > _MAX_EVENT:
            raise ValueError(f"an event of more than {_MAX_EVENT} bytes")
