"""Server-sent events, read as they come: their data, without comments and names."""

from collections.abc import AsyncIterator

_LARGEST = 32 * 2**20


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event that came whole; ValueError where one has no end."""
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
        if len(pending) + sum(map(len, data)) > _LARGEST:
            raise ValueError(f"an event of more than {_LARGEST} bytes")
