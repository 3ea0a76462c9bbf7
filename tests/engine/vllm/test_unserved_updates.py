"""An update that another follows is applied to the trainer's weights only."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leyden.engine.protocol import EngineError
from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.process import VllmOptions

NOBODY = "http://127.0.0.1:9"


class SumUpdate:
    """Adds one to a weight."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def apply(self) -> None:
        self._weight += 1

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self._weight

    def adapter(self) -> None:
        return None


async def test_an_update_that_is_only_applied_is_not_sent_to_vllm(tmp_path: Path) -> None:
    weight = torch.zeros(1)
    update = SumUpdate(weight)
    backend = VllmBackend(
        VllmOptions(tmp_path),
        tmp_path / "vllm.log",
        update.tensors,
        context_length=10,
        vocab_size=10,
        concurrency=1,
        version=3,
        url=NOBODY,
    )
    await backend.apply(update, 4)
    assert weight.item() == 1 and backend.address.version == 4  # what a vLLM that starts now would get
    with pytest.raises(EngineError):
        await backend.publish(update, 5)
    assert weight.item() == 2
    await backend.close()
