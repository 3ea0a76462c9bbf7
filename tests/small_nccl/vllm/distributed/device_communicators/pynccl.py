"""Broadcasts over TCP what vLLM's class of this name broadcasts over NCCL: a call returns when all have the tensor."""

import io
import os
import time

import torch
from vllm.distributed.utils import StatelessProcessGroup


class PyNcclCommunicator:
    def __init__(self, group: StatelessProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self._number = 0
        self.disabled = bool(os.environ.get("VLLM_DISABLE_PYNCCL"))

    def destroy(self) -> None:
        """Let a call that waits return."""
        self.disabled = True

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        store, rank, key = self._group.store, self._group.rank, f"tensor-{self._number}"
        self._number += 1
        if rank == src:
            content = io.BytesIO()
            torch.save(tensor, content)
            store.set(key, content.getvalue())
            taken = [f"{key}-at-{other}" for other in range(self._group.world_size) if other != src]
            while not self.disabled and not store.check(taken):
                time.sleep(0.002)
        else:
            tensor.copy_(torch.load(io.BytesIO(store.get(key))))
            store.set(f"{key}-at-{rank}", b"")
