"""Replays decoding steps as CUDA graphs of a few sizes. On other devices the same padded steps are computed directly.

A graph reads its inputs from static buffers. Steps are padded to the next captured size with rows of an unused slot.
Graphs are captured when a size is first needed, and again after `clear`, when the buffers of the KV cache have moved.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from leyden.engine.torch.transfer import to_device

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

Inputs = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class DecodeGraphs:
    """The captured graphs of one computation, from [input, request] to [request, output]."""

    def __init__(self, compute: Callable[[Tensor], Tensor], padding: tuple[int, ...], device: torch.device) -> None:
        """`padding` is the column of inputs that fills a step up to its size."""
        self._compute, self._device = compute, device
        self._padding = np.array(padding, np.int64)[:, None]
        self._graphs: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        self._pool = _new_pool(device)

    @staticmethod
    def fits(requests: int) -> bool:
        """Whether a step with this many requests can be padded to a captured size."""
        return requests <= SIZES[-1]

    def clear(self) -> None:
        """Forget the graphs: tensors that they read or write have moved."""
        self._graphs.clear()
        self._pool = _new_pool(self._device)  # torch refuses a pool whose last graph is gone

    def __call__(self, inputs: Inputs) -> Tensor:
        """Compute one step; the result is valid until the next one."""
        requests = inputs.shape[1]
        size = next(size for size in SIZES if size >= requests)
        padded = np.concatenate((inputs, np.repeat(self._padding, size - requests, 1)), 1)
        if size not in self._graphs:
            buffer = to_device(padded, self._device).clone()
            self._graphs[size] = buffer, self._capture(buffer)
        buffer, replay = self._graphs[size]
        buffer.copy_(to_device(padded, self._device))
        return replay()[:requests]

    def _capture(self, buffer: Tensor) -> Callable[[], Tensor]:
        if self._device.type != "cuda":
            return lambda: self._compute(buffer)
        self._compute(buffer)  # compiles kernels and allocates workspaces, which a capture must not
        graph = torch.cuda.CUDAGraph()
        # other threads, like the trainer's, may use the device during the capture
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._compute(buffer)

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def _new_pool(device: torch.device) -> "torch.cuda._POOL_HANDLE | None":
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
