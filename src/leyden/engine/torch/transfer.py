"""Copies between host and device that do not stop the host: both directions use pinned memory on CUDA."""

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


def let_trainer_wait(engines: torch.cuda.Stream | None) -> None:
    """Let what the trainer computes from now on wait for what the engine has started."""
    if engines is not None:
        torch.cuda.default_stream(engines.device).wait_stream(engines)


def let_engine_wait(engines: torch.cuda.Stream | None) -> None:
    """Let what the engine computes from now on wait for what the trainer has started."""
    if engines is not None:
        engines.wait_stream(torch.cuda.default_stream(engines.device))
