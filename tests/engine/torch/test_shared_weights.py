"""One copy of the weights is mapped by its readers; a version is written only while nobody reads."""

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Self

import msgspec
import pytest
import torch
from torch import Tensor

from leyden.engine.protocol import EngineError
from leyden.engine.torch.shared_weights import SharedWeights, read_any_weights
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.weight_files import WeightFiles

Described = dict[str, tuple[tuple[int, ...], str, int]]
"""By name: shape, dtype and checksum."""
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]
READER = """
import json, sys
from pathlib import Path
from leyden.engine.torch.shared_weights import read_any_weights
from leyden.engine.vllm.extension.leyden_weights import checksum
for line in sys.stdin:
    read = {name: tensor.clone() for name, tensor in read_any_weights(Path(line.strip()))}
    print(json.dumps({name: (one.shape, str(one.dtype), checksum(one)) for name, one in read.items()}), flush=True)
"""


class Source:
    """Weights that count how often they are read."""

    def __init__(self, value: float, device: str = "cpu") -> None:
        self.value, self.device, self.reads = value, device, 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        self.reads += 1
        yield "matrix", torch.full((3, 2), self.value, device=self.device).t()  # not contiguous
        yield "scale", torch.tensor(self.value, dtype=torch.bfloat16, device=self.device)
        yield "rows", torch.arange(5.0, device=self.device) * self.value


class Reader:
    """Another process."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", READER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def read(self, folder: Path) -> Described:
        """Return what it reads in a folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(folder, file=self._process.stdin, flush=True)
        return msgspec.json.decode(self._process.stdout.readline(), type=Described)


def described(source: Source) -> Described:
    return {name: (tuple(one.shape), str(one.dtype), checksum(one.clone())) for name, one in source()}


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader() as started:
        yield started


@pytest.mark.parametrize("device", DEVICES)
async def test_another_process_maps_the_copy_once_and_sees_every_version(device: str, reader: Reader) -> None:
    with closing(SharedWeights()) as shared:
        for version, value in enumerate((2.5, -1.0, 7.0)):
            written = await shared.write(Source(value, device), version)
            assert (written.version, written.nbytes) == (version, 24 + 2 + 20)
            found = await asyncio.to_thread(reader.read, written.folder)
            assert found == described(Source(value, device))
            assert {name: value for name, (*_, value) in found.items()} == written.checksums
    assert not written.folder.exists()


async def test_a_version_is_written_once_for_all() -> None:
    with closing(SharedWeights()) as shared:
        source = Source(2.5)
        one, other = await asyncio.gather(shared.write(source, 3), shared.write(source, 3))
        assert one is other and source.reads == 1


async def test_a_version_waits_until_nobody_reads_the_one_before() -> None:
    with closing(SharedWeights()) as shared:
        await shared.write(Source(1.0), 1)
        async with shared.reading() as first:
            writing = asyncio.create_task(shared.write(Source(2.0), 2))
            late = asyncio.create_task(latest_of(shared))
            await asyncio.sleep(0.05)
            assert not writing.done() and not late.done()
            assert float(dict(read_any_weights(first.folder))["scale"]) == 1.0
        assert (await writing).version == 2
        assert await late == (2, 2.0)


async def test_nobody_reads_what_a_write_that_was_cancelled_still_writes() -> None:
    with closing(SharedWeights()) as shared:
        await shared.write(Source(1.0), 1)
        slow = SlowSource(2.0)
        writing = asyncio.create_task(shared.write(slow, 2))
        await asyncio.to_thread(slow.reading.wait)
        writing.cancel()
        late = asyncio.create_task(latest_of(shared))
        await asyncio.sleep(0.05)
        assert not late.done()
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await writing
        await late
        await shared.write(Source(3.0), 3)
        assert await latest_of(shared) == (3, 3.0)


async def test_a_full_disk_is_an_error_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    error = pytest.raises(EngineError, match=r"no copy of the weights .* No space left on device")
    with closing(SharedWeights()) as shared, error:
        await shared.write(Source(1.0), 1)


class SlowSource(Source):
    """Weights that are read only when they may."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        self.reading.set()
        self.go_on.wait()
        yield from super().__call__()


async def latest_of(shared: SharedWeights) -> tuple[int, float]:
    async with shared.reading() as latest:
        return latest.version, float(dict(read_any_weights(latest.folder))["scale"])


async def test_files_are_read_as_well() -> None:
    with closing(WeightFiles()) as files:
        written = await files.write(Source(4.0), 1)
        assert float(dict(read_any_weights(written.folder))["scale"]) == 4.0
