"""The engine of a run, as `engine.kind` says. Everything else knows it only by its protocol."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from transformers import PreTrainedModel

from leyden.config import Config
from leyden.engine.protocol import EngineBackend
from leyden.engine.torch.engine import TorchEngine
from leyden.rendering.tokenizer import Tokenizer
from leyden.trainer.policy.loading import ModelSource


@asynccontextmanager
async def running_engine(
    config: Config, model: PreTrainedModel, source: ModelSource, version: int
) -> AsyncIterator[EngineBackend]:
    """An engine that serves a model, closed at the end. The embedded engine shares the parameters of `model`."""
    engine = TorchEngine(
        model,
        slots=1 if config.deterministic else config.engine.slots,
        version=version,
        prefix_caching=not config.deterministic,
        tokenizer=Tokenizer.load(source.folder).control_json,
    )
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
