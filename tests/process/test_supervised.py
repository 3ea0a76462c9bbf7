"""A process that ends too often within a time is not started again; one that ends now and then is."""

import asyncio

import pytest

from leyden.process.supervised import SupervisedProcess


class Scripted(SupervisedProcess):
    """Ends at some times. `refused`: whether it ends at once when it is started again."""

    def __init__(self, ends: list[float], refused: bool = False) -> None:
        super().__init__("it", 3, 60.0, RuntimeError)
        self._ends, self._refused, self.restarts = ends, refused, 0
        self.ended = False

    async def start(self) -> None:
        self._start_supervising()

    async def _end(self) -> None:
        self.ended = True

    async def _wait_ended(self) -> str:
        if not self._ends:
            raise ValueError("it is not needed any more")
        return f"it ended at {self._ends[0]:g}"

    async def _restart(self, reason: str) -> str | None:
        self.restarts += 1
        return "it did not start" if self._refused else None

    def _clock(self) -> float:
        return self._ends.pop(0)


async def test_ends_count_only_within_the_time() -> None:
    async with Scripted([0.0, 50.0, 100.0, 140.0, 159.0, 1000.0]) as process:
        with pytest.raises(RuntimeError, match="it keeps dying: it ended at 159"):
            await process.wait_failed()
    assert process.restarts == 4 and process.is_gone


async def test_a_start_that_fails_counts_as_an_end() -> None:
    async with Scripted([0.0, 1.0, 2.0], refused=True) as process:
        with pytest.raises(RuntimeError, match="it keeps dying: it did not start"):
            await process.wait_failed()


async def test_an_error_ends_the_supervision() -> None:
    async with Scripted([0.0]) as process:
        assert not process.is_gone
        with pytest.raises(ValueError, match="not needed"):
            await process.wait_failed()
    assert process.restarts == 1


async def test_a_process_ends_although_its_stop_is_cancelled() -> None:
    process = Scripted([0.0])
    await process.start()
    stopping = asyncio.create_task(process.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    await asyncio.wait({stopping})
    assert stopping.cancelled() and process.ended
