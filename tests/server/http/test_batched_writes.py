"""What is written in one iteration of the event loop is sent at once; nothing is lost or held back."""

import asyncio

from leyden.server.http.batched_writes import BatchedTransport


class Recorded(asyncio.Transport):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def test_the_head_and_the_body_of_a_response_are_one_write() -> None:
    inner = Recorded()
    transport = BatchedTransport(inner, asyncio.get_running_loop())
    transport.write(b"head ")
    transport.write(b"body")
    assert inner.sent == []
    await asyncio.sleep(0)
    assert inner.sent == [b"head body"]
    transport.write(b"next")
    await asyncio.sleep(0)
    assert inner.sent == [b"head body", b"next"]


async def test_closing_sends_what_was_written_and_nothing_is_sent_after_it() -> None:
    inner = Recorded()
    transport = BatchedTransport(inner, asyncio.get_running_loop())
    transport.write(b"last")
    transport.close()
    assert inner.sent == [b"last"] and inner.closed
    transport.write(b"late")
    await asyncio.sleep(0)
    assert inner.sent == [b"last"]


async def test_much_data_is_passed_on_at_once_so_that_the_writer_can_be_paused() -> None:
    inner = Recorded()
    transport = BatchedTransport(inner, asyncio.get_running_loop())
    for _ in range(10):
        transport.write(b"x" * 40_000)
    assert len(b"".join(inner.sent)) >= 300_000
    await asyncio.sleep(0)
    assert len(b"".join(inner.sent)) == 400_000
