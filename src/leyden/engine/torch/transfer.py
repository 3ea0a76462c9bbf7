"""Copies between host and device that do not stop the host: both directions use pinned memory on CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: "np.ndarray[Any, Any]", device: torch.device) -> Tensor:
    """Copy an array to the device, in the order of the current stream, without waiting."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """A copy of a tensor to the host, which starts when it is created."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._done = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> Tensor:
        """Return the copy when it is complete."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


@contextmanager
def trainers_stream(engines: torch.cuda.Stream | None) -> Iterator[None]:
    """Compute on the stream of the trainer, after the engine's work and before what the engine does next."""
    if engines is None:
        yield
        return
    trainers = torch.cuda.default_stream(engines.device)
    trainers.wait_stream(engines)
    try:
        with torch.cuda.stream(trainers):
            yield
    finally:
        engines.wait_stream(trainers)
