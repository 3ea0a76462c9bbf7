"""Starts the engine that `engine.kind` selects. All other code uses only its protocol."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import torch
from transformers import PreTrainedModel

from leyden.config import Config, ConfigError
from leyden.engine.protocol import EngineBackend, EngineError
from leyden.engine.torch.engine import TorchEngine
from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.launch import VllmOptions, adapter_arguments, find_vllm
from leyden.learner.policy import Policy
from leyden.local.memory_plan import MemoryPlan, plan_memory
from leyden.local.notes import print_note
from leyden.models.source import ModelSource
from leyden.rendering.tokenizer import Tokenizer

_CPU_SLOTS, _GPU_SLOTS, _VLLM_REQUESTS = 64, 256, 1024
_VLLM_CPU_SHARE = 0.2
VLLM_STREAM_INTERVAL = 8
"""Tokens that vLLM sends at once, after the first: one message for each would keep its front end and ours busy."""


@asynccontextmanager
async def running_engine(
    config: Config,
    folder: Path,
    model: PreTrainedModel,
    source: ModelSource,
    version: int,
    policy: Policy | None = None,
) -> AsyncIterator[EngineBackend]:
    """Run an engine that serves a model, within this context. The embedded one shares the parameters of `model`.

    `policy` is what is trained beside it: the engine leaves it memory, and takes its LoRA adapter.
    """
    kind, why = choose_engine(config, model.device)
    slots = _slots(config, kind, model.device)
    print_note(f"engine: {kind} ({why}), {slots} requests at once, {_precision(model)}")
    plan: MemoryPlan | None = None
    if model.device.type == "cuda" and config.engine.url is None:
        plan = _plan(config, model, policy, slots if kind == "torch" else None)
        print_note(str(plan))
    try:
        if kind == "torch":
            kv_cache_bytes = None if plan is None else plan.kv_cache
            with closing(_torch_engine(config, model, source, version, slots, kv_cache_bytes)) as engine:
                engine.start()
                yield engine
        else:
            if policy is not None and policy.adapter is not None:
                policy.adapter.compute_unmerged()
            backend = _vllm_backend(config, folder, model, source, version, policy, slots, plan)
            async with _running_vllm(backend, plan, model.device):
                yield backend
    except EngineError as error:
        raise ConfigError(f"`engine`: {error}") from error


@asynccontextmanager
async def _running_vllm(backend: VllmBackend, plan: MemoryPlan | None, device: torch.device) -> AsyncIterator[None]:
    try:
        if plan is not None:  # torch keeps memory that it has freed: it must not keep what is vLLM's
            torch.cuda.set_per_process_memory_fraction(plan.trainer_share, device)
        await backend.start()
        yield
    finally:
        await backend.close()
        if plan is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def choose_engine(config: Config, device: torch.device) -> tuple[str, str]:
    """Return the kind of engine of a run, and the reason for the choice."""
    if config.engine.url is not None:
        return "vllm", config.engine.url
    if config.engine.kind != "auto":
        return config.engine.kind, "`engine.kind`"
    if config.deterministic:
        return "torch", "a deterministic run"
    if device.type != "cuda":
        return "torch", "no CUDA device"
    installed = find_vllm(_vllm_python(config))
    if installed is None:
        return "torch", "vLLM is not installed: pip install vllm"
    return "vllm", f"a CUDA device and vLLM {installed.version}"


def _slots(config: Config, kind: str, device: torch.device) -> int:
    """Return how many requests the engine computes at once."""
    if kind == "vllm":
        return config.engine.slots or _VLLM_REQUESTS
    by_device = _CPU_SLOTS if device.type == "cpu" else _GPU_SLOTS
    return 1 if config.deterministic else config.engine.slots or by_device


def _plan(config: Config, model: PreTrainedModel, policy: Policy | None, slots: int | None) -> MemoryPlan:
    """Plan the memory of the model's GPU; with `slots` for the embedded engine."""
    free, total = torch.cuda.mem_get_info(model.device)
    others = total - free - torch.cuda.memory_reserved(model.device)
    reference = policy is not None and policy.has_reference
    return plan_memory(config, model, total, policy is not None, reference, others, slots)


def _torch_engine(
    config: Config, model: PreTrainedModel, source: ModelSource, version: int, slots: int, kv_cache_bytes: int | None
) -> TorchEngine:
    return TorchEngine(
        model,
        slots=slots,
        version=version,
        prefix_caching=not config.deterministic,
        tokenizer=Tokenizer.load(source.folder).control_json,
        dtype=model.dtype,
        kv_cache_bytes=kv_cache_bytes,
    )


def _vllm_backend(
    config: Config,
    folder: Path,
    model: PreTrainedModel,
    source: ModelSource,
    version: int,
    policy: Policy | None,
    slots: int,
    plan: MemoryPlan | None,
) -> VllmBackend:
    share = config.engine.memory or _VLLM_CPU_SHARE if plan is None else plan.engine_share
    # On a CPU vLLM takes this for a share of the machine's memory.
    shared = ("--gpu-memory-utilization", f"{share:.3f}")
    batched = ("--max-num-seqs", str(slots), "--stream-interval", str(VLLM_STREAM_INTERVAL))
    adapter = policy.adapter if policy is not None else None
    text = model.config.get_text_config()
    return VllmBackend(
        VllmOptions(
            model=source.folder,
            python=_vllm_python(config),
            transfer="ipc" if plan is not None else "files",
            dtype=_precision(model),
            arguments=(
                *shared,
                *batched,
                *(adapter_arguments(adapter.rank) if adapter is not None else ()),
                *config.engine.vllm_arguments,
            ),
        ),
        folder / "vllm.log",
        model.named_parameters if adapter is None else adapter.base_tensors,
        adapter=None if adapter is None else adapter.weights,
        context_length=int(text.max_position_embeddings),
        vocab_size=int(text.vocab_size),
        concurrency=slots,
        tokenizer=Tokenizer.load(source.folder).control_json,
        version=version,
        seeded=config.deterministic,
        url=config.engine.url,
        sleeps_while_training=plan is not None and plan.engine_sleeps,
    )


def _precision(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _vllm_python(config: Config) -> str:
    return config.engine.vllm_python or sys.executable
