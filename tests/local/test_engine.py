"""The engine of a run has the precision of its model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_engines import check, complete, make_request
from transformers import AutoModelForCausalLM, PreTrainedModel

import leyden.local.engine
from leyden.config import Config, read_config
from leyden.engine.torch.engine import TorchEngine
from leyden.local.engine import running_engine
from leyden.trainer.policy.loading import find_model

SPARK = find_model("spark", ".")


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
