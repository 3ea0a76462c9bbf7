"""What a policy needs of the other processes that compute its updates with it; `ALONE` if there are none."""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from leyden.learner.microbatch import MicroBatch

T = TypeVar("T")


class Peers(Protocol):
    """All processes make the same calls in the same order, and each has some of the samples."""

    @property
    def copies(self) -> bool:
        """Whether every process has room for whole copies of the model."""

    def gather(self, value: T) -> list[T]:
        """Return the value of every process."""

    def level(self, microbatches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Return as many micro-batches in every process: empty ones follow those of a process that has fewer."""

    def shard(self, module: nn.Module) -> None:
        """Divide the parameters of a module over the processes; they are whole while it computes."""

    def norm(self, tensors: Sequence[Tensor]) -> float:
        """Return the norm of all tensors together, of which each process may have a part."""


class Alone:
    """A process that computes updates by itself."""

    copies = True

    def gather(self, value: T) -> list[T]:
        """Return the value."""
        return [value]

    def level(self, microbatches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Return them as they are."""
        return microbatches

    def shard(self, module: nn.Module) -> None:
        """Leave the module whole."""

    def norm(self, tensors: Sequence[Tensor]) -> float:
        """Return the norm of all tensors together."""
        return torch.nn.utils.get_total_norm(tensors).item()


ALONE = Alone()
