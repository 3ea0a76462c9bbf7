"""An optimiser step does not stop vLLM, which has its own copy of the weights."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.launch import VllmOptions
from leyden.engine.vllm.serving import ServingOptions
from leyden.engine.weight_files import NamedTensors, WeightFiles

NOBODY = "http://127.0.0.1:9"


class OneWeight:
    """A model of one parameter."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight

    def adapter(self) -> None:
        return None


class RecordingPublisher:
    """Records what a vLLM is sent."""

    def __init__(self, events: list[str], vllm: str) -> None:
        self._events, self._vllm = events, vllm

    async def pause(self) -> None:
        self._events.append(f"pause {self._vllm}")
        await asyncio.sleep(0)

    async def send(self, weights: Callable[[], NamedTensors], version: int) -> int:
        self._events.append(f"send version {version}, weight {dict(weights())['weight'].item():.0f} to {self._vllm}")
        await asyncio.sleep(0)
        return 4

    async def resume(self) -> None:
        self._events.append(f"resume {self._vllm}")
        await asyncio.sleep(0)


async def test_a_vllm_that_is_restarted_in_a_step_gets_its_weights_once_when_they_are_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, events = OneWeight(), list[str]()
    backend = VllmBackend(
        VllmOptions(tmp_path),
        tmp_path / "vllm.log",
        model.tensors,
        ServingOptions(context_length=10, vocab_size=10, concurrency=1, url=NOBODY),
        files=WeightFiles(),
        version=3,
    )
    monkeypatch.setattr(backend, "_publisher", RecordingPublisher(events, "the dead vLLM"))
    monkeypatch.setattr(backend, "_new_publisher", lambda: RecordingPublisher(events, "the new vLLM"))
    assert not backend.shares_parameters
    async with backend.changing_weights(4):
        restarting = asyncio.create_task(backend._restarted())
        model.weight += 1
    assert backend.address.version == 3  # what a server process that starts now is told: no vLLM has another version
    async with backend.changing_weights(5):
        model.weight += 1
    await asyncio.sleep(0)
    assert not restarting.done() and not events

    async def recovered() -> bool:
        await restarting
        return True

    monkeypatch.setattr(backend._server, "recovered", recovered)
    await backend.publish(model, 5)
    events.append("published")
    await restarting
    delivery = ["pause the new vLLM", "send version 5, weight 2 to the new vLLM", "resume the new vLLM"]
    assert events == [*delivery, "published"]
    assert backend.address.version == 5

    model.weight += 1
    assert (await backend.publish(model, 6)).transferred_bytes == 4
    assert events[4:] == [line.replace("version 5, weight 2", "version 6, weight 3") for line in delivery]
    await backend.stop()
