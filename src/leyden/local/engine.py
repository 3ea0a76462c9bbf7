"""Starts the engine that `engine.kind` selects. All other code uses only its protocol."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from importlib.util import find_spec
from pathlib import Path

import torch
from msgspec import Struct
from transformers import PreTrainedModel

from leyden.config import Config, ConfigError
from leyden.engine.protocol import EngineBackend, EngineError
from leyden.engine.replicas import ReplicaBackend, ReplicaPart
from leyden.engine.torch.engine import TorchEngine
from leyden.engine.torch.process import TorchProcess
from leyden.engine.torch.wire import EngineProcessOptions
from leyden.engine.vllm.backend import Adapter, VllmBackend, Weights
from leyden.engine.vllm.launch import Transfer, VllmOptions, adapter_arguments, find_vllm
from leyden.engine.weight_files import WeightFiles
from leyden.learner.loading import model_device
from leyden.learner.policy import Policy
from leyden.learner.ranks.learner import GatheredWeights
from leyden.learner.sharded_files import is_sharded
from leyden.local.memory_plan import MemoryPlan, plan_memory
from leyden.local.notes import print_note
from leyden.local.placement import TRAINER_DEVICE, check_tensor_parallel, device_variable, place_replicas
from leyden.models.source import ModelSource
from leyden.rendering.tokenizer import Tokenizer

_CPU_SLOTS, _GPU_SLOTS, _VLLM_REQUESTS = 64, 256, 1024
_VLLM_CPU_SHARE = 0.2
_OWN_DEVICE_SHARE = 0.9
"""The part of a device that an engine takes beside which nothing is trained."""
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
    weights: GatheredWeights | None = None,
) -> AsyncIterator[EngineBackend]:
    """Run an engine that serves a model, within this context. The embedded one shares the parameters of `model`.

    `policy` is what is trained beside it: the engine leaves it memory, and takes its LoRA adapter. `weights` are those
    of a policy that is trained in other processes: `model` then has no values, and the engine is a process too.
    """
    device = model_device(model)
    kind, why = choose_engine(config, device)
    if kind == "vllm" and is_sharded(source.folder):
        raise ConfigError(
            f"`model`: {source.folder} is a sharded checkpoint, which vLLM does not read: write it as a Hugging Face "
            'folder with `leyden export`, and name that, or set `engine.kind = "torch"`'
        )
    check_tensor_parallel(config.engine.tensor_parallel, model.config.get_text_config())
    on_gpu = device.type == "cuda"
    places = place_replicas(config, torch.cuda.device_count() if on_gpu else 0, config.training.devices)
    slots = _slots(config, kind, device)
    replicas = f" in each of {len(places)} replicas" if len(places) > 1 else ""
    print_note(f"engine: {kind} ({why}), {slots} requests at once{replicas}, {_precision(model)}")
    plan: MemoryPlan | None = None
    if on_gpu and config.engine.url is None and any(TRAINER_DEVICE in place for place in places):
        plan = _plan(config, model, policy, slots if kind == "torch" else None)
        print_note(str(plan))
        if plan.engine_sleeps and len(places) > 1:
            raise ConfigError(
                "`engine.replicas`: beside training there is no memory for them on its device, and replicas do not "
                "sleep: lower `training.batch_tokens`, name other devices in `engine.devices`, or leave it out"
            )
    if kind == "vllm" and policy is not None and policy.adapter is not None:
        policy.adapter.compute_unmerged()
    try:
        if kind == "torch" and len(places) == 1 and weights is None:
            kv_cache_bytes = None if plan is None else plan.kv_cache
            with closing(_torch_engine(config, model, source, version, slots, kv_cache_bytes)) as engine:
                engine.start()
                yield engine
            return
        with closing(WeightFiles()) as files:
            shared = _Shared(config, folder, model, source, version, policy, weights, slots, plan, places, files)
            start = _torch_process if kind == "torch" else _vllm_backend
            parts: list[ReplicaPart] = [start(shared, number) for number in range(len(places))]
            weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
            alone = kind == "vllm" and len(parts) == 1
            backend = parts[0] if alone else ReplicaBackend(parts, weight_bytes)
            async with _running(backend, plan if kind == "vllm" else None, device):
                yield backend
    except EngineError as error:
        raise ConfigError(f"`engine`: {error}") from error


@asynccontextmanager
async def _running(
    backend: ReplicaPart | ReplicaBackend, plan: MemoryPlan | None, device: torch.device
) -> AsyncIterator[None]:
    try:
        if plan is not None:  # torch keeps memory that it has freed: it must not keep what is vLLM's
            torch.cuda.set_per_process_memory_fraction(plan.trainer_share, device)
        await backend.start()
        yield
    finally:
        await backend.stop()
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


class _Shared(Struct, frozen=True):
    """What the replicas of an engine have in common."""

    config: Config
    folder: Path
    model: PreTrainedModel
    source: ModelSource
    version: int
    policy: Policy | None
    weights: GatheredWeights | None
    slots: int
    plan: MemoryPlan | None
    places: Sequence[tuple[int, ...]]
    files: WeightFiles


def _torch_process(shared: _Shared, number: int) -> TorchProcess:
    options = EngineProcessOptions(
        model=str(shared.source.folder),
        dtype=_precision(shared.model),
        slots=shared.slots,
        replicas=len(shared.places),
        tokenizer=Tokenizer.load(shared.source.folder).control_json,
    )
    return TorchProcess(
        options,
        device_variable(shared.places[number]),
        shared.files,
        shared.folder / f"engine-{number}.log",
        shared.model.named_parameters if shared.weights is None else shared.weights.tensors,
        shared.version,
    )


def _vllm_backend(shared: _Shared, number: int) -> VllmBackend:
    config, plan, devices = shared.config, shared.plan, shared.places[number]
    share = config.engine.memory or (_OWN_DEVICE_SHARE if devices else _VLLM_CPU_SHARE)
    if plan is not None and TRAINER_DEVICE in devices:
        share = plan.engine_share / sum(TRAINER_DEVICE in place for place in shared.places)
    # On a CPU vLLM takes this for a share of the machine's memory.
    memory = ("--gpu-memory-utilization", f"{share:.3f}")
    batched = ("--max-num-seqs", str(shared.slots), "--stream-interval", str(VLLM_STREAM_INTERVAL))
    width = config.engine.tensor_parallel
    divided = ("--tensor-parallel-size", str(width)) if width > 1 else ()
    tensors, adapter = _vllm_weights(shared)
    lora = config.training.lora
    if adapter is not None and width > 1:
        raise ConfigError("`engine.tensor_parallel` cannot be combined with `training.lora`: set `engine.replicas`")
    transfer: Transfer = "ipc" if plan is not None and devices == (TRAINER_DEVICE,) else "files"
    if config.engine.transfer == "nccl":
        beside = TRAINER_DEVICE in devices or not devices
        if beside or config.training.devices > 1 or find_spec("vllm") is None:
            raise ConfigError(
                "`engine.transfer`: NCCL is for engines on other CUDA devices than the only one that trains, and needs "
                "vLLM in the trainer's environment: leave it out, or name the devices in `engine.devices`"
            )
        transfer = "nccl"
    text = shared.model.config.get_text_config()
    return VllmBackend(
        VllmOptions(
            model=shared.source.folder,
            python=_vllm_python(config),
            transfer=transfer,
            dtype=_precision(shared.model),
            arguments=(
                *memory,
                *batched,
                *divided,
                *(adapter_arguments(lora.rank) if adapter is not None and lora is not None else ()),
                *config.engine.vllm_arguments,
            ),
            environment=device_variable(devices),
        ),
        shared.folder / ("vllm.log" if len(shared.places) == 1 else f"vllm-{number}.log"),
        tensors,
        adapter=adapter,
        context_length=int(text.max_position_embeddings),
        vocab_size=int(text.vocab_size),
        concurrency=shared.slots,
        tokenizer=Tokenizer.load(shared.source.folder).control_json,
        version=shared.version,
        seeded=config.deterministic,
        url=config.engine.url,
        sleeps_while_training=plan is not None and plan.engine_sleeps,
        files=shared.files,
    )


def _vllm_weights(shared: _Shared) -> tuple[Weights, Adapter | None]:
    """Return the weights that vLLM starts with, and the LoRA adapter beside them."""
    if (weights := shared.weights) is not None:
        return (weights.tensors, None) if shared.config.training.lora is None else (weights.base, weights.adapter)
    if shared.policy is None or shared.policy.adapter is None:
        return shared.model.named_parameters, None
    return shared.policy.adapter.base_tensors, shared.policy.adapter.weights


def _precision(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _vllm_python(config: Config) -> str:
    return config.engine.vllm_python or sys.executable
