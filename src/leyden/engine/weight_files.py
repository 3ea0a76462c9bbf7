"""Weights as files: written once for all engines of a machine, and kept for an engine that is started again.

Tensors are written one by one, as they come: a sharded model is never in memory as a whole.
"""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct
from safetensors.torch import load_file, save_file
from torch import Tensor

from leyden.engine.protocol import EngineError
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.process.temporary import TemporaryFolder

NamedTensors = Iterable[tuple[str, Tensor]]
Weights = Callable[[], NamedTensors]
"""Returns the weights as they are now."""
_SHOWN = 3


class WrittenWeights(Struct, frozen=True):
    """A folder with the weights of one version."""

    folder: Path
    version: int
    checksums: Mapping[str, int]
    nbytes: int


class WeightFiles:
    """Writes the weights of each version, and deletes those of the version before when nobody reads them."""

    def __init__(self) -> None:
        self._folder = TemporaryFolder("weights")
        self._writing = asyncio.Lock()
        self._readers = Counter[Path]()
        self._latest: WrittenWeights | None = None

    def close(self) -> None:
        """Delete all files."""
        self._folder.close()

    async def write(self, tensors: Weights, version: int) -> WrittenWeights:
        """Write the weights of a version, unless the latest ones are of this version."""
        async with self._writing:
            before = self._latest
            if before is None or before.version != version:
                folder = self._folder.path / str(version)
                self._latest = await asyncio.to_thread(_write, tensors(), folder, version)
                if before is not None:
                    self._delete_unread(before.folder)
            assert self._latest is not None
            return self._latest

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[WrittenWeights]:
        """Return the latest weights, whose files stay within this context."""
        assert self._latest is not None
        weights = self._latest
        self._readers[weights.folder] += 1
        try:
            yield weights
        finally:
            self._readers[weights.folder] -= 1
            self._delete_unread(weights.folder)

    def _delete_unread(self, folder: Path) -> None:
        if not self._readers[folder] and self._latest is not None and self._latest.folder != folder:
            shutil.rmtree(folder, ignore_errors=True)


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder, one by one."""
    for file in sorted(folder.glob("*.safetensors")):
        yield from load_file(file).items()


def compare(expected: Mapping[str, int], found: Mapping[str, int], when: str) -> None:
    """Raise `EngineError` unless an engine has exactly the trainer's tensors."""
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if different:
        raise EngineError(
            f"{when}, {len(different)} of {len(found)} tensors in the engine differ from the trainer's:"
            f" {', '.join(different[:_SHOWN])}"
        )


def _write(tensors: NamedTensors, folder: Path, version: int) -> WrittenWeights:
    folder.mkdir(parents=True, exist_ok=True)
    checksums, nbytes = dict[str, int](), 0
    for number, (name, tensor) in enumerate(tensors):
        checksums[name] = checksum(tensor.detach())  # where it is: a GPU is much faster
        plain = tensor.detach().cpu().contiguous()
        save_file({name: plain}, folder / f"{number:06}.safetensors")
        nbytes += plain.nbytes
    return WrittenWeights(folder, version, checksums, nbytes)
