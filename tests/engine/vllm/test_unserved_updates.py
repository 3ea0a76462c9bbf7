"""An optimiser step does not stop vLLM, which has its own copy of the weights."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.launch import VllmOptions

NOBODY = "http://127.0.0.1:9"


class OneWeight:
    """A model of one parameter."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight

    def adapter(self) -> None:
        return None


async def test_a_vllm_that_is_restarted_in_a_step_gets_no_weights_until_they_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sent = OneWeight(), list[tuple[int, float]]()
    backend = VllmBackend(
        VllmOptions(tmp_path),
        tmp_path / "vllm.log",
        model.tensors,
        context_length=10,
        vocab_size=10,
        concurrency=1,
        version=3,
        url=NOBODY,
    )

    async def deliver() -> int:
        sent.append((backend.address.version, model.weight.item()))
        return 0

    monkeypatch.setattr(backend, "_deliver", deliver)
    assert not backend.shares_parameters
    async with backend.changing_weights(4):
        restarting = asyncio.create_task(backend._restarted())
        model.weight += 1
    assert backend.address.version == 4  # what a server process that starts now is told
    async with backend.changing_weights(5):
        model.weight += 1
    await asyncio.sleep(0)
    assert not restarting.done() and not sent
    await backend.publish(model, 5)
    await restarting
    assert sent == [(5, 2.0)] * 2
    await backend.close()
