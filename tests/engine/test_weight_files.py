"""Weights are written once for all engines, and stay until nobody reads them and there are newer ones."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor

from leyden.engine.protocol import EngineError
from leyden.engine.weight_files import WeightFiles, compare, read_weights


class Source:
    """Weights that count how often they are read."""

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        self.reads += 1
        yield "matrix", torch.full((3, 2), self.value).t()  # not contiguous
        yield "scale", torch.tensor(self.value, dtype=torch.bfloat16)


async def test_a_version_is_written_once_for_all_and_read_back() -> None:
    with closing(WeightFiles()) as files:
        source = Source(2.5)
        one, other = await asyncio.gather(files.write(source, 3), files.write(source, 3))
        assert one is other and source.reads == 1
        read = dict(read_weights(one.folder))
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in read.items()} == {
            "matrix": ((2, 3), torch.float32),
            "scale": ((), torch.bfloat16),
        }
        assert all(bool((tensor == 2.5).all()) for tensor in read.values())
        assert one.nbytes == 26
        assert one.checksums != (await files.write(Source(2.0), 4)).checksums
    assert not one.folder.exists()


async def test_files_stay_while_they_are_read() -> None:
    with closing(WeightFiles()) as files:
        first = await files.write(Source(1.0), 1)
        async with files.reading() as read, files.reading():
            second = await files.write(Source(2.0), 2)
            assert read is first and first.folder.exists()
            async with files.reading() as latest:
                assert latest is second
        assert not first.folder.exists() and second.folder.exists()
        third = await files.write(Source(3.0), 3)
        assert not second.folder.exists() and third.folder.exists()


def test_tensors_that_differ_or_are_missing_are_named() -> None:
    compare({"a": 1, "b": 2}, {"a": 1, "b": 2}, "after publishing")
    for found in ({"a": 1, "b": 3}, {"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(EngineError, match=r"1 of \d tensors in the engine differ from the trainer's: [bc]"):
            compare({"a": 1, "b": 2}, found, "after publishing")
