"""Starts the engine that `engine.kind` selects. All other code uses only its protocol."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
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
from leyden.engine.torch.shared_weights import SharedWeights
from leyden.engine.torch.sizing import process_bytes
from leyden.engine.torch.wire import EngineProcessOptions
from leyden.engine.vllm.adapters import Adapter, AdapterBackend, AdapterServer
from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.launch import Transfer, VllmOptions, adapter_arguments, find_vllm
from leyden.engine.vllm.serving import ServingOptions
from leyden.engine.weight_files import WeightFiles, Weights
from leyden.learner.loading import model_device
from leyden.learner.sharded_files import is_sharded
from leyden.local.memory_plan import EngineProcesses, MemoryPlan
from leyden.local.notes import print_note
from leyden.local.placement import TRAINER_DEVICE, check_tensor_parallel, device_variable, place_replicas
from leyden.local.policies import LocalPolicy
from leyden.process.place import FindPlace, this_machine
from leyden.rendering.tokenizer import Tokenizer

_CPU_SLOTS, _GPU_SLOTS, _VLLM_REQUESTS = 64, 256, 1024
_VLLM_CPU_SHARE = 0.2
_OWN_DEVICE_SHARE = 0.9
"""The part of a device that an engine takes beside which nothing is trained."""
VLLM_STREAM_INTERVAL = 8
"""Tokens that vLLM sends at once, after the first: one message for each would keep its front end and ours busy."""


@asynccontextmanager
async def running_engine(
    folder: Path,
    policies: Sequence[LocalPolicy],
    plan: MemoryPlan | None = None,
    number: int = 0,
    engines: int = 1,
    elsewhere: Sequence[FindPlace] = (),
    own_process: bool = False,
) -> AsyncIterator[dict[str, EngineBackend]]:
    """Run an engine, the `number`-th of `engines`, and yield it for each policy that it serves.

    Several policies are LoRA adapters over one base, in vLLM. The embedded engine shares the parameters of a policy's
    model, unless it has its `own_process`. If a policy is trained in other processes, its model has no values, and the
    engine is a process too.
    With places `elsewhere`, each replica has one, where it sees only its own devices.
    """
    first = policies[0]
    config, model, source = first.config, first.model, first.source
    device = model_device(model)
    kind, why = choose_engine(config, device)
    if kind == "vllm" and is_sharded(source.folder):
        raise ConfigError(
            f"`model`: {source.folder} is a sharded checkpoint, which vLLM does not read: write it as a Hugging Face "
            'folder with `leyden export`, and name that, or set `engine.kind = "torch"`'
        )
    check_tensor_parallel(config.engine.tensor_parallel, model.config.get_text_config())
    places = own_devices(config, device) if elsewhere else engine_places(config, device)
    slots = count_slots(config, kind, device)
    replicas = f" in each of {len(places)} replicas" if len(places) > 1 else ""
    own = " in a process of its own" if kind == "torch" and own_process and not replicas else ""
    served = f" for {', '.join(one.name for one in policies)}" if engines > 1 or len(policies) > 1 else ""
    print_note(f"engine{served}: {kind} ({why}), {slots} requests at once{replicas}{own}, {_precision(model)}")
    if plan is not None and plan.engine_sleeps and len(places) > 1:
        raise ConfigError(
            "`engine.replicas`: beside training there is no memory for them on its device, and replicas do not "
            "sleep: lower `training.batch_tokens`, name other devices in `engine.devices`, or leave it out"
        )
    for one in policies:
        if kind == "vllm" and one.policy is not None and one.policy.adapter is not None:
            one.policy.adapter.compute_unmerged()
    try:
        beside = len(places) == 1 and shares_copy(places)
        if kind == "torch" and not own_process and beside and first.weights is None:
            engine = TorchEngine(
                model,
                slots=slots,
                version=first.version,
                prefix_caching=not config.deterministic,
                tokenizer=Tokenizer.load(source.folder).control_json,
                dtype=model.dtype,
                kv_cache_bytes=None if plan is None else plan.kv_cache,
            )
            with closing(engine):
                engine.start()
                yield {first.name: engine}
            return
        with closing(WeightFiles()) as files, closing(SharedWeights()) as copy:
            shared = _Shared(folder, policies, slots, plan, number, engines, places, elsewhere, files, copy)
            start = _torch_process if kind == "torch" else _vllm_backends
            replicas_of: list[list[ReplicaPart]] = [start(shared, place) for place in range(len(places))]
            weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
            alone = kind == "vllm" and len(places) == 1
            async with AsyncExitStack() as opened:
                backends: dict[str, EngineBackend] = {}
                for one, *parts in zip(policies, *replicas_of, strict=True):
                    backend = parts[0] if alone else ReplicaBackend(parts, weight_bytes)
                    await opened.enter_async_context(_running(backend, plan, device))
                    backends[one.name] = backend
                yield backends
    except EngineError as error:
        raise ConfigError(f"`engine`: {error}") from error


@asynccontextmanager
async def _running(
    backend: ReplicaPart | ReplicaBackend, plan: MemoryPlan | None, device: torch.device
) -> AsyncIterator[None]:
    try:
        if plan is not None:  # torch keeps memory that it has freed: it must not keep what is the engine's
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


def samples_in_own_process(policies: Sequence[LocalPolicy], device: torch.device) -> bool:
    """Whether engines that can be embedded are processes: training overlaps with sampling, and a GPU computes both.

    In one process, the thread that trains and the one that samples would wait for each other at every operation.
    """
    overlaps = policies[0].config.training.max_staleness > 0 and any(one.is_trained for one in policies)
    return overlaps and device.type == "cuda"


def engine_processes(groups: Sequence[Sequence[LocalPolicy]], slots: int) -> EngineProcesses | None:
    """Return how embedded engines, with so many slots, share the trainer's device; None: as a part of its process."""
    device = model_device(groups[0][0].model)
    places = engine_places(groups[0][0].config, device)
    if len(places) == 1 and not samples_in_own_process([one for group in groups for one in group], device):
        return None
    count = sum(TRAINER_DEVICE in place for place in places)
    return EngineProcesses(count, tuple(process_bytes(group[0].model, slots) for group in groups), shares_copy(places))


def shares_copy(places: Sequence[tuple[int, ...]]) -> bool:
    """Whether all replicas are where weights are trained, so that their processes can map one copy of them."""
    return all(devices in ((), (TRAINER_DEVICE,)) for devices in places)


def engine_places(config: Config, device: torch.device) -> list[tuple[int, ...]]:
    """Return the CUDA devices of each replica of an engine; those of several engines are the same."""
    return place_replicas(config, torch.cuda.device_count() if device.type == "cuda" else 0)


def own_devices(config: Config, device: torch.device) -> list[tuple[int, ...]]:
    """Return devices for each replica that has machines of its own: others than the trainer's."""
    own = range(TRAINER_DEVICE + 1, TRAINER_DEVICE + 1 + config.engine.tensor_parallel)
    return [tuple(own) if device.type == "cuda" else ()] * config.engine.replicas


def count_slots(config: Config, kind: str, device: torch.device) -> int:
    """Return how many requests an engine computes at once."""
    if kind == "vllm":
        return config.engine.slots or _VLLM_REQUESTS
    by_device = _CPU_SLOTS if device.type == "cpu" else _GPU_SLOTS
    return 1 if config.deterministic else config.engine.slots or by_device


class _Shared(Struct, frozen=True):
    """What the replicas of an engine have in common."""

    folder: Path
    policies: Sequence[LocalPolicy]
    slots: int
    plan: MemoryPlan | None
    number: int
    """Of the engine, among those of the run."""
    engines: int
    places: Sequence[tuple[int, ...]]
    elsewhere: Sequence[FindPlace]
    files: WeightFiles
    copy: SharedWeights

    def environment(self, place: int) -> dict[str, str]:
        """Return the variables by which a replica sees only its devices; elsewhere it sees no others."""
        return {} if self.elsewhere else device_variable(self.places[place])

    def find_place(self, place: int) -> FindPlace:
        """Return what finds the place of a replica."""
        return self.elsewhere[place] if self.elsewhere else this_machine


def _torch_process(shared: _Shared, place: int) -> list[ReplicaPart]:
    (one,) = shared.policies
    devices = shared.places[place]
    copied = not shared.elsewhere and one.weights is None and shares_copy(shared.places)
    options = EngineProcessOptions(
        model=str(one.source.folder),
        dtype=_precision(one.model),
        slots=shared.slots,
        replicas=len(shared.places) * shared.engines,
        tokenizer=Tokenizer.load(one.source.folder).control_json,
        device_share=_memory_share(shared, devices) if devices else None,
        beside_kv_cache=process_bytes(one.model, shared.slots),
    )
    process = TorchProcess(
        options,
        shared.environment(place),
        shared.copy if copied else shared.files,
        shared.folder / f"engine-{place}.log",
        one.model.named_parameters if one.weights is None else one.weights.tensors,
        one.version,
        shared.find_place(place),
    )
    return [process]


def _vllm_backends(shared: _Shared, place: int) -> list[ReplicaPart]:
    """Return a vLLM server, as a part of the engine of each policy."""
    first, plan, devices = shared.policies[0], shared.plan, shared.places[place]
    config, width = first.config, first.config.engine.tensor_parallel
    base, adapters = _vllm_weights(shared.policies)
    if adapters and width > 1:
        raise ConfigError("`engine.tensor_parallel` cannot be combined with `training.lora`: set `engine.replicas`")
    ranks = [one.config.training.lora.rank for one in shared.policies if one.config.training.lora is not None]
    text = first.model.config.get_text_config()
    options = VllmOptions(
        model=first.source.folder,
        python=_vllm_python(config),
        transfer=_transfer(config, devices, plan),
        dtype=_precision(first.model),
        arguments=(
            # On a CPU vLLM takes this for a share of the machine's memory.
            *("--gpu-memory-utilization", f"{_memory_share(shared, devices):.3f}"),
            *("--max-num-seqs", str(shared.slots), "--stream-interval", str(VLLM_STREAM_INTERVAL)),
            *(("--tensor-parallel-size", str(width)) if width > 1 else ()),
            *(adapter_arguments(max(ranks), len(adapters)) if adapters else ()),
            *config.engine.vllm_arguments,
        ),
        environment=shared.environment(place),
    )
    serving = ServingOptions(
        context_length=int(text.max_position_embeddings),
        vocab_size=int(text.vocab_size),
        concurrency=shared.slots,
        tokenizer=Tokenizer.load(first.source.folder).control_json,
        seeded=config.deterministic,
        url=config.engine.url,
        sleeps_while_training=plan is not None and plan.engine_sleeps,
        find_place=shared.find_place(place),
    )
    log = shared.folder / ("vllm.log" if len(shared.places) == 1 else f"vllm-{place}.log")
    if not adapters:
        return [VllmBackend(options, log, base, serving, shared.files, first.version)]
    server = AdapterServer(options, log, base, adapters, serving, shared.files)
    return [AdapterBackend(server, one.name) for one in shared.policies]


def _memory_share(shared: _Shared, devices: Sequence[int]) -> float:
    """Return the part of each device that a process takes; engines, and replicas on the trainer's device, divide it."""
    if shared.plan is not None and TRAINER_DEVICE in devices:
        return shared.plan.engine_share(shared.number) / sum(TRAINER_DEVICE in place for place in shared.places)
    share = shared.policies[0].config.engine.memory or (_OWN_DEVICE_SHARE if devices else _VLLM_CPU_SHARE)
    return share / shared.engines


def _transfer(config: Config, devices: Sequence[int], plan: MemoryPlan | None) -> Transfer:
    """Return how weights arrive at vLLM."""
    if config.engine.transfer == "nccl":
        if TRAINER_DEVICE in devices or not devices or find_spec("vllm") is None:
            raise ConfigError(
                "`engine.transfer`: NCCL is for engines on other CUDA devices than those that train, and needs vLLM in "
                "the trainer's environment: leave it out, or name the devices in `engine.devices`"
            )
        if config.training.lora is not None:
            raise ConfigError("`engine.transfer`: adapters (`training.lora`) are sent as files: leave it out")
        return "nccl"
    return "ipc" if plan is not None and tuple(devices) == (TRAINER_DEVICE,) else "files"


def _vllm_weights(policies: Sequence[LocalPolicy]) -> tuple[Weights, dict[str, tuple[Adapter, int]]]:
    """Return the weights that vLLM starts with, and the LoRA adapters beside them, with their versions, by policy."""
    first = policies[0]
    if (gathered := first.weights) is not None:
        if first.config.training.lora is None:
            return gathered.tensors, {}
        return gathered.base, {first.name: (gathered.adapter, first.version)}
    adapters: dict[str, tuple[Adapter, int]] = {}
    base: Weights = first.model.named_parameters
    for one in policies:
        if one.policy is not None and one.policy.adapter is not None:
            base, adapters[one.name] = one.policy.adapter.base_tensors, (one.policy.adapter.weights, one.version)
        elif one.adapter is not None:
            adapters[one.name] = one.adapter, one.version
    return base, adapters


def _precision(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _vllm_python(config: Config) -> str:
    return config.engine.vllm_python or sys.executable
