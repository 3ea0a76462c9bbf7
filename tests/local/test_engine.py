"""The engine of a run has the precision, the slots and the memory that configuration and plan say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_engines import check, complete, make_request
from transformers import AutoModelForCausalLM, PreTrainedModel

import leyden.local.engine
from leyden.config import AdapterConfig, Config, ConfigError, TrainingConfig, read_config
from leyden.engine.protocol import EngineError
from leyden.engine.torch.engine import TorchEngine
from leyden.engine.vllm.backend import VllmBackend
from leyden.learner.lora import MergedLoraLinear
from leyden.learner.policy import Policy
from leyden.local.engine import running_engine
from leyden.models.source import find_model

GIB = 2**30
SPARK = find_model("spark", ".")
FAKE_VLLM = """#!/bin/sh
[ "$1" = -c ] && echo '{"version": "0.25", "scale_out_flag": false}' && exit
echo "$@"
exit 1
"""
"""An interpreter whose vLLM logs its arguments and ends."""


@pytest.fixture
def model() -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(SPARK.folder, dtype=torch.float32)
    return loaded


def config(**engine: object) -> Config:
    return read_config({"run": "r", "agent": "a.py:f", "tasks": "t.jsonl", "engine": engine})


async def test_the_embedded_engine_has_the_models_precision_whatever_the_devices_default(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DefaultOfGpus(TorchEngine):
        def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None = None, **settings: Any) -> None:
            super().__init__(model, dtype=dtype or torch.bfloat16, **settings)

    monkeypatch.setattr(leyden.local.engine, "TorchEngine", DefaultOfGpus)
    async with running_engine(config(kind="torch"), tmp_path, model, SPARK, 0) as engine:
        assert isinstance(engine, TorchEngine)
        check(model, await complete(engine, make_request((1, 2, 3))))


async def test_vllm_computes_as_many_requests_at_once_as_there_are_slots(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_VLLM)
    python.chmod(0o755)
    chosen = config(kind="vllm", slots=12, vllm_python=str(python))
    with pytest.raises(ConfigError, match="vLLM did not start"):
        async with running_engine(chosen, tmp_path, model, SPARK, 0):
            pass
    assert " --max-num-seqs 12 " in (tmp_path / "vllm.log").read_text()


@pytest.mark.parametrize("kind", ["torch", "vllm"])
async def test_adapters_are_computed_as_the_engine_does(
    kind: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(backend: VllmBackend) -> None:
        """Start nothing."""

    monkeypatch.setattr(VllmBackend, "start", start)
    policy = Policy(model, TrainingConfig(lora=AdapterConfig()))
    async with running_engine(config(kind=kind), tmp_path, model, SPARK, 0, policy):
        layers = [layer for layer in policy.model.modules() if isinstance(layer, MergedLoraLinear)]
        assert {layer.unmerged for layer in layers} == {kind == "vllm"}


@pytest.mark.parametrize("starts", [True, False])
async def test_the_trainers_memory_is_limited_from_before_vllm_starts_until_it_has_ended(
    starts: bool, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    stop = VllmBackend.stop

    async def recorded_start(backend: VllmBackend) -> None:
        events.append("vLLM starts")
        if not starts:
            raise EngineError("no memory")

    async def recorded_stop(backend: VllmBackend) -> None:
        await stop(backend)
        events.append("vLLM ended")

    def limit(share: float, device: torch.device) -> None:
        events.append(f"trainer limited to {share:.2f} of {device}")

    monkeypatch.setattr(VllmBackend, "start", recorded_start)
    monkeypatch.setattr(VllmBackend, "stop", recorded_stop)
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    try:
        async with running_engine(config(kind="vllm", memory=0.5), tmp_path, model, SPARK, 0):
            events.append("sampling")
    except ConfigError as error:
        assert str(error) == "`engine`: no memory"
    assert events == [
        "trainer limited to 0.45 of cuda:0",  # 40 GiB of 80 are the engine's, 4 are in reserve
        "vLLM starts",
        *(["sampling"] if starts else []),
        "vLLM ended",
        "trainer limited to 1.00 of cuda:0",
    ]
