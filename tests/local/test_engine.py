"""The engine of a run has the precision, the slots and the memory that configuration and plan say."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from small_engines import check, complete, make_request
from transformers import AutoModelForCausalLM, PreTrainedModel

import leyden.local.engine
from leyden.config import AdapterConfig, Config, ConfigError, TrainingConfig, read_config
from leyden.engine.protocol import EngineError, VllmAddress
from leyden.engine.torch.engine import TorchEngine
from leyden.engine.torch.process import TorchProcess
from leyden.engine.torch.shared_weights import SharedWeights
from leyden.engine.vllm.backend import VllmBackend
from leyden.engine.vllm.serving import ServedVllm
from leyden.engine.weight_files import WeightFiles
from leyden.learner.lora import MergedLoraLinear
from leyden.learner.policy import Policy
from leyden.local.engine import _transfer, samples_in_own_process
from leyden.local.engines import running_engines
from leyden.local.policies import LocalPolicy
from leyden.models.source import find_model

GIB = 2**30
SPARK = find_model("spark", ".")
TASKS = {"run": "r", "agent": "a.py:f", "tasks": "t.jsonl"}
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
    return read_config({**TASKS, "engine": engine})


async def test_the_embedded_engine_has_the_models_precision_whatever_the_devices_default(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class DefaultOfGpus(TorchEngine):
        def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None = None, **settings: Any) -> None:
            super().__init__(model, dtype=dtype or torch.bfloat16, **settings)

    monkeypatch.setattr(leyden.local.engine, "TorchEngine", DefaultOfGpus)
    async with running_engines(tmp_path, [LocalPolicy(config(kind="torch"), SPARK, model)]) as engines:
        engine = engines["policy"]
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
        async with running_engines(tmp_path, [LocalPolicy(chosen, SPARK, model)]):
            pass
    assert " --max-num-seqs 12 " in (tmp_path / "vllm.log").read_text()


@pytest.mark.parametrize(
    ("devices", "training", "has_vllm", "refusal"),
    [
        ([1], {}, True, None),
        ([2, 3], {"devices": 2}, True, None),
        ([1], {}, False, "NCCL is for engines on other CUDA devices .* needs vLLM in the trainer's environment"),
        ([0, 1], {}, True, "NCCL is for engines on other CUDA devices"),
        ([], {}, True, "NCCL is for engines on other CUDA devices"),
        ([1], {"lora": True}, True, r"adapters \(`training.lora`\) are sent as files: leave it out"),
    ],
)
def test_nccl_is_for_whole_weights_and_engines_on_other_devices(
    devices: list[int],
    training: dict[str, Any],
    has_vllm: bool,
    refusal: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leyden.local.engine, "find_spec", lambda name: object() if has_vllm else None)
    chosen = read_config({**TASKS, "training": training, "engine": {"kind": "vllm", "transfer": "nccl"}})
    if refusal is None:
        assert _transfer(chosen, devices, None) == "nccl"
    else:
        with pytest.raises(ConfigError, match=refusal):
            _transfer(chosen, devices, None)


@pytest.mark.parametrize("kind", ["torch", "vllm"])
async def test_adapters_are_computed_as_the_engine_does(
    kind: str, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(backend: ServedVllm) -> None:
        """Start nothing."""

    monkeypatch.setattr(ServedVllm, "start", start)
    training = TrainingConfig(lora=AdapterConfig())
    policy = Policy(model, training)
    own = replace(config(kind=kind), training=training)
    async with running_engines(tmp_path, [LocalPolicy(own, SPARK, model, policy=policy)]):
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
        async with running_engines(tmp_path, [LocalPolicy(config(kind="vllm", memory=0.5), SPARK, model)]):
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


def lora_policy(name: str, rank: int, model: PreTrainedModel, beside: Policy | None = None) -> LocalPolicy:
    training = TrainingConfig(lora=AdapterConfig(rank=rank))
    own = replace(config(kind="vllm"), training=training, policy=name)
    return LocalPolicy(own, SPARK, model, policy=Policy(model, training, beside=beside))


async def test_adapters_over_one_base_share_a_vllm_and_other_policies_have_their_own(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []

    async def start(server: ServedVllm) -> None:
        started.append(server._options.arguments)

    monkeypatch.setattr(ServedVllm, "start", start)
    writer = lora_policy("writer", 4, model)
    checker = lora_policy("checker", 16, deepcopy(model), writer.policy)
    judge = LocalPolicy(replace(config(kind="vllm"), policy="judge"), SPARK, model)
    assert writer.policy is not None and writer.policy.adapter is not None
    rival = LocalPolicy(
        replace(config(kind="vllm"), policy="rival"), SPARK, model, adapter=writer.policy.adapter.weights
    )
    async with running_engines(tmp_path, [writer, judge, checker, rival]) as engines:
        addresses = {name: engine.address for name, engine in engines.items()}
    locations = {name: address.location for name, address in addresses.items() if isinstance(address, VllmAddress)}
    assert locations["writer"] == locations["checker"] == locations["rival"] != locations["judge"]
    assert [address.adapter for address in addresses.values() if isinstance(address, VllmAddress)] == [
        "writer",
        "checker",
        "rival",
        None,
    ]
    adapters, plain = started
    assert adapters[adapters.index("--enable-lora") :] == (
        *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "6", "--max-lora-rank", "16"),
    )
    assert "--enable-lora" not in plain
    assert adapters[:2] == plain[:2] == ("--gpu-memory-utilization", "0.100")  # they divide what one would have


async def test_separate_models_cannot_share_a_vllm_that_runs_already(model: PreTrainedModel, tmp_path: Path) -> None:
    own = config(kind="vllm", url="unix:/nowhere.sock")
    policies = [LocalPolicy(replace(own, policy=name), SPARK, model) for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"`engine.url` is one vLLM, and `policies` take 2: leave it out"):
        async with running_engines(tmp_path, policies):
            pass


async def test_on_one_gpu_two_adapters_have_one_engine_and_separate_models_divide_its_memory(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[str] = []
    limits: list[float] = []

    async def start(server: ServedVllm) -> None:
        shares.append(server._options.arguments[1])
        assert server._options.environment == {"CUDA_VISIBLE_DEVICES": "0"} and server._options.transfer == "ipc"

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ServedVllm, "start", start)
    writer = lora_policy("writer", 4, model)
    checker = lora_policy("checker", 4, deepcopy(model), writer.policy)
    alone = [
        replace(one, policy=None, config=replace(one.config, training=TrainingConfig())) for one in (writer, checker)
    ]
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    async with running_engines(tmp_path, [writer, checker]):
        assert shares == ["0.600"] and limits == [pytest.approx(0.35), pytest.approx(0.35)]
    async with running_engines(tmp_path, alone):
        assert shares[1:] == ["0.300", "0.300"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB, 4 * GIB))
    with pytest.raises(ConfigError, match="2 engines at least"):
        async with running_engines(tmp_path, alone):
            pass
    assert len(shares) == 3  # nothing was started


def overlapping(model: PreTrainedModel, max_staleness: int = 1, trained: bool = True) -> LocalPolicy:
    training = TrainingConfig(max_staleness=max_staleness)
    own = replace(config(kind="torch", slots=4), training=training)
    return LocalPolicy(own, SPARK, model, policy=Policy(model, training) if trained else None)


@pytest.mark.parametrize(
    ("max_staleness", "trained", "device", "own_process"),
    [
        (1, True, "cuda:0", True),
        (1, True, "cpu", False),
        (0, True, "cuda:0", False),
        (1, False, "cuda:0", False),
    ],
)
def test_an_engine_has_its_own_process_where_training_overlaps_with_sampling_on_a_gpu(
    max_staleness: int, trained: bool, device: str, own_process: bool, model: PreTrainedModel
) -> None:
    policies = [overlapping(model, max_staleness, trained), overlapping(model, max_staleness, trained=False)]
    assert samples_in_own_process(policies, torch.device(device)) is own_process


@pytest.fixture
def policy(model: PreTrainedModel) -> LocalPolicy:
    """One that is trained while agents go on, on a CPU so far."""
    return overlapping(model)


@pytest.fixture
def started(policy: LocalPolicy, monkeypatch: pytest.MonkeyPatch) -> list[TorchProcess]:
    """The engine processes that are started, on a machine of two GPUs of 80 GiB."""
    processes: list[TorchProcess] = []

    async def start(process: TorchProcess) -> None:
        processes.append(process)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(TorchProcess, "start", start)
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    return processes


async def test_on_one_gpu_the_process_of_the_embedded_engine_and_training_have_what_is_planned(
    policy: LocalPolicy,
    started: list[TorchProcess],
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    async with running_engines(tmp_path, [policy]):
        (process,) = started
        assert limits == [pytest.approx(0.35)]  # 60 % are the engine's, 4 GiB of 80 are in reserve
    assert limits[1:] == [1.0]
    assert isinstance(process._written, SharedWeights)
    options, environment = process._options, process._environment
    assert environment == {"CUDA_VISIBLE_DEVICES": "0"}
    assert options.device_share == pytest.approx(0.6) and options.slots == 4
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert GIB < options.beside_kv_cache - 2 * weights < 1.1 * GIB  # logits and activations


async def test_an_embedded_engine_on_another_gpu_is_a_process_that_has_most_of_it(
    started: list[TorchProcess], model: PreTrainedModel, tmp_path: Path
) -> None:
    policy = LocalPolicy(config(kind="torch", devices=[1]), SPARK, model)
    async with running_engines(tmp_path, [policy]):
        (process,) = started
        assert process._environment == {"CUDA_VISIBLE_DEVICES": "1"}
        assert isinstance(process._written, WeightFiles) and process._options.device_share == 0.9
