"""After an update the trainer gives memory back to a vLLM that slept meanwhile. Needs neither vLLM nor a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from leyden.engine.protocol import EngineError
from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.process import VllmOptions


class RecordedUpdate:
    """Records when it is applied."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def apply(self) -> None:
        self._events.append("applied")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def adapter(self) -> None:
        return None


@pytest.mark.parametrize(
    ("sleeps", "expected"),
    [(True, ["applied", "cache emptied"]), (False, ["applied"])],
    ids=["slept", "beside"],
)
async def test_memory_is_given_back_after_the_update_is_applied(
    sleeps: bool, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("cache emptied"))
    backend = VllmBackend(
        VllmOptions(model=tmp_path, transfer="ipc"),
        tmp_path / "vllm.log",
        lambda: iter(()),
        context_length=8,
        vocab_size=8,
        concurrency=1,
        url="http://127.0.0.1:9",
        sleeps_while_training=sleeps,
    )
    with pytest.raises(EngineError, match="connection"):  # no vLLM runs there
        await backend.publish(RecordedUpdate(events), 1)
    await backend.close()
    assert events == expected
