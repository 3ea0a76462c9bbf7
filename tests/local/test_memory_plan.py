"""Trainer and engine share one GPU by a plan that is made before anything starts."""

import re
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from leyden.config import Config, ConfigError, read_config
from leyden.engine.torch.sizing import process_bytes
from leyden.local.memory_plan import EngineProcesses, MemoryPlan, PlannedPolicy
from leyden.local.memory_plan import plan_memory as plan_engines
from leyden.local.memory_plan import plan_training as plan_trained

GIB = 2**30


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """The shape of Qwen2.5-1.5B, without memory for its weights."""
    shape = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    config = Qwen2Config(vocab_size=151_936, num_key_value_heads=2, tie_word_embeddings=True, **shape)
    with torch.device("meta"):
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made


def config(memory: float | None = None, **training: object) -> Config:
    engine = {} if memory is None else {"memory": memory}
    return read_config({"run": "r", "agent": "a.py:f", "tasks": "t.jsonl", "training": training, "engine": engine})


def plan_memory(
    config: Config, model: PreTrainedModel, device: int, training: bool, reference: bool, others: int = 0, **engine: Any
) -> MemoryPlan:
    """Plan for one policy."""
    return plan_engines([[PlannedPolicy(config, model, training, reference)]], device, others, **engine)


def plan_training(config: Config, model: PreTrainedModel, device: int, reference: bool, others: int = 0) -> MemoryPlan:
    """Plan for one policy without an engine."""
    return plan_trained([PlannedPolicy(config, model, True, reference)], device, others)


def test_a_model_of_1_5b_is_trained_whole_beside_its_engine_on_80_gib(model: PreTrainedModel) -> None:
    plan = plan_memory(config(), model, 80 * GIB, training=True, reference=False)
    assert 25 * GIB < plan.training < 28 * GIB  # 18 bytes a parameter
    assert plan.training + plan.activations + plan.engine < 80 * GIB
    assert plan.engine > 10 * GIB


def test_without_training_the_engine_takes_most(model: PreTrainedModel) -> None:
    plan = plan_memory(config(), model, 80 * GIB, training=False, reference=False)
    assert (plan.engine_share(), plan.activations) == (pytest.approx(0.6), 0)
    assert str(plan) == "memory: training 2.9, activations 0.0, engine 48.0, reserve 4.0 of 80 GiB"


def test_the_engine_takes_the_share_that_is_set_or_the_plan_says_what_is_left(model: PreTrainedModel) -> None:
    plan = plan_memory(config(memory=0.2), model, 140 * GIB, training=True, reference=False)
    assert plan.engine_share() == pytest.approx(0.2)
    with pytest.raises(ConfigError, match=r"`engine.memory`: of 140 GiB training takes .* leaves a share of 0.\d+ for"):
        plan_memory(config(memory=0.9), model, 140 * GIB, training=True, reference=False)


def test_an_engine_with_too_little_memory_beside_training_sleeps_meanwhile(model: PreTrainedModel) -> None:
    plan = plan_memory(config(), model, 72 * GIB, training=True, reference=False)
    assert plan.engine_sleeps and plan.engine > 30 * GIB
    assert plan.training + plan.engine < 72 * GIB and plan.training + plan.activations < 72 * GIB
    assert re.search(r"engine \(asleep during training\) \d+\.\d, reserve", str(plan))
    assert not plan_memory(config(), model, 80 * GIB, training=True, reference=False).engine_sleeps


def test_agents_cannot_go_on_beside_an_engine_that_would_sleep(model: PreTrainedModel) -> None:
    for key, value in {"max_staleness": 1, "early_gradient": True}.items():
        with pytest.raises(ConfigError, match=rf"`training.{key}`: of 72 GiB .* must sleep .*: leave it out"):
            plan_memory(config(**{key: value}), model, 72 * GIB, training=True, reference=False)
    assert not plan_memory(config(max_staleness=1), model, 80 * GIB, training=True, reference=False).engine_sleeps


def test_the_trainer_may_take_what_the_engine_does_not_have(model: PreTrainedModel) -> None:
    beside = plan_memory(config(memory=0.2), model, 140 * GIB, training=True, reference=False, others=10 * GIB)
    assert beside.trainer_share == pytest.approx(0.8 - 14 / 140)
    asleep = plan_memory(config(), model, 72 * GIB, training=True, reference=False)
    assert asleep.trainer_share == pytest.approx(65 / 72)
    for plan in beside, asleep:
        assert plan.training + plan.activations <= plan.trainer_share * plan.device


def test_a_share_that_does_not_fit_beside_training_makes_the_engine_sleep(model: PreTrainedModel) -> None:
    assert not plan_memory(config(memory=0.15), model, 80 * GIB, training=True, reference=False).engine_sleeps
    plan = plan_memory(config(memory=0.5), model, 80 * GIB, training=True, reference=False)
    assert plan.engine_sleeps and plan.engine_share() == pytest.approx(0.5)
    with pytest.raises(ConfigError, match=r"leaves a share of 0\.6\d for the engine"):
        plan_memory(config(memory=0.7), model, 80 * GIB, training=True, reference=False)


def test_what_does_not_fit_is_refused_with_what_to_change(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match=r"of 40 GiB training takes .* lower `training.batch_tokens`"):
        plan_memory(config(), model, 40 * GIB, training=True, reference=False)
    plan_memory(config(gradient_checkpointing=True), model, 48 * GIB, training=True, reference=False)
    plan_memory(config(lora={"rank": 16}, batch_tokens=4096), model, 40 * GIB, training=True, reference=False)


def test_what_other_processes_use_is_not_planned_with(model: PreTrainedModel) -> None:
    alone = plan_memory(config(), model, 140 * GIB, training=True, reference=False, others=GIB // 2)  # its CUDA context
    assert alone == plan_memory(config(), model, 140 * GIB, training=True, reference=False)
    beside = plan_memory(config(), model, 140 * GIB, training=True, reference=False, others=55 * GIB)
    assert beside.training + beside.activations + beside.engine <= 81 * GIB  # 4 in reserve
    assert str(beside).endswith("reserve 4.0, other processes 55.0 of 140 GiB")
    with pytest.raises(
        ConfigError, match=r"of 140 GiB other processes use 100.0, training takes \d+\.\d and the engine"
    ):
        plan_memory(config(), model, 140 * GIB, training=True, reference=False, others=100 * GIB)


def test_the_embedded_engine_has_what_training_leaves_and_does_not_sleep(model: PreTrainedModel) -> None:
    plan = plan_memory(config(), model, 80 * GIB, training=True, reference=False, slots=256)
    assert plan.training + plan.activations + plan.engine < 80 * GIB
    assert plan.engine - plan.kv_cache == sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(ConfigError, match=r"of 72 GiB training takes .* lower `engine.slots`, or a smaller model"):
        plan_memory(config(), model, 72 * GIB, training=True, reference=False, slots=512)
    assert plan_memory(config(), model, 72 * GIB, training=True, reference=False).engine_sleeps
    shared = plan_memory(config(memory=0.1), model, 80 * GIB, training=True, reference=False, slots=64)
    assert shared.engine_share() == pytest.approx(0.1)


@pytest.fixture(scope="module")
def large() -> PreTrainedModel:
    """The shape of Qwen2.5-7B."""
    shape = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28}
    with torch.device("meta"):
        config = Qwen2Config(vocab_size=152_064, num_key_value_heads=4, tie_word_embeddings=False, **shape)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return made


def test_7b_is_trained_whole_on_one_gpu_of_140_gib_with_its_optimiser_on_the_host(large: PreTrainedModel) -> None:
    with pytest.raises(
        ConfigError, match=r'training takes 202.*set .*`training.offload = "optimiser"` or `training.lora`'
    ):
        plan_memory(config(), large, 140 * GIB, training=True, reference=False)
    plan = plan_memory(config(offload="optimiser"), large, 140 * GIB, training=True, reference=False)
    assert 42 * GIB < plan.training < 43 * GIB and plan.host < 94 * GIB
    assert str(plan).endswith("reserve 4.0 of 140 GiB; 93.2 in host memory")


def test_devices_that_only_train_have_a_plan_too(large: PreTrainedModel) -> None:
    plan = plan_training(config(devices=4), large, 140 * GIB, reference=False)
    assert str(plan) == "memory: training 37.1, activations 75.1, reserve 4.0 of 140 GiB"
    with pytest.raises(ConfigError, match=r"of 80 GiB training takes 112.* on each of 4 devices: lower `training.b"):
        plan_training(config(devices=4), large, 80 * GIB, reference=False)
    plan_training(config(devices=4, gradient_checkpointing=True), large, 80 * GIB, reference=False)
    with pytest.raises(ConfigError, match=r"other processes use 50\.0, "):
        plan_training(config(devices=4), large, 140 * GIB, reference=False, others=50 * GIB)


def test_adapters_over_one_base_take_one_engine_and_one_base(model: PreTrainedModel) -> None:
    lora = config(lora={"rank": 16})
    weights = sum(parameter.nbytes for parameter in model.parameters())
    one = plan_engines([[PlannedPolicy(lora, model, True)]], 80 * GIB)
    two = plan_engines(
        [[PlannedPolicy(lora, model, True), PlannedPolicy(lora, model, True, shares_base=True)]], 80 * GIB
    )
    assert two.activations == one.activations  # they are trained one after the other
    assert weights < two.training - one.training < 1.3 * weights  # its merged copy, its matrices and their moments
    assert two.weights == (weights,) and str(two).startswith("memory: training ")


def test_engines_of_separate_models_divide_the_memory(model: PreTrainedModel) -> None:
    separate = [[PlannedPolicy(config(), model, True)], [PlannedPolicy(config(), model)]]
    plan = plan_engines(separate, 140 * GIB)
    assert plan.training + plan.activations + plan.engine + 4 * GIB <= 140 * GIB
    assert plan.engine_share(0) == plan.engine_share(1) == pytest.approx(plan.engine / plan.device / 2)
    assert "2 engines" in str(plan) and not plan.engine_sleeps
    embedded = plan_engines(separate, 140 * GIB, slots=256)
    assert embedded.engine == sum(embedded.weights) + 2 * embedded.kv_cache


def test_several_policies_that_do_not_fit_are_refused_with_what_to_change(model: PreTrainedModel) -> None:
    assert plan_engines([[PlannedPolicy(config(), model, True)]], 72 * GIB).engine_sleeps
    with pytest.raises(ConfigError, match=r"2 engines at least .* name one `model` for all `policies`, with `lora`"):
        plan_engines([[PlannedPolicy(config(), model, True)], [PlannedPolicy(config(), model)]], 72 * GIB)
    with pytest.raises(ConfigError, match=r"`engine.memory`: .* leaves a share of 0.\d+ for 2 engines"):
        plan_engines([[PlannedPolicy(config(0.9), model, True)], [PlannedPolicy(config(0.9), model)]], 140 * GIB)


def processes(model: PreTrainedModel, count: int, slots: int = 256, share_copy: bool = False) -> EngineProcesses:
    return EngineProcesses(count, (process_bytes(model, slots),), share_copy)


def test_processes_of_the_embedded_engine_have_parameters_and_copies_of_them(model: PreTrainedModel) -> None:
    def plan(slots: int, used: EngineProcesses | None, device: int = 140 * GIB) -> MemoryPlan:
        return plan_memory(config(), model, device, training=True, reference=False, slots=slots, processes=used)

    embedded, one, two = plan(256, None), plan(256, processes(model, 1)), plan(256, processes(model, 2))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert embedded.engine == one.engine == two.engine
    beyond = embedded.kv_cache - one.kv_cache - weights  # logits and activations
    assert 3 * GIB < beyond < 4 * GIB
    assert one.kv_cache - two.kv_cache == 2 * weights + beyond
    assert one.kv_cache - plan(1024, processes(model, 1, 1024)).kv_cache > 4 * GIB  # logits of 1024 requests
    copied = plan(256, processes(model, 1, share_copy=True))
    assert copied.training == one.training + weights and copied.kv_cache == one.kv_cache - weights
    assert one.engine_share() * one.device == pytest.approx(one.engine)
    plan(256, None, 80 * GIB)
    with pytest.raises(ConfigError, match=r"of 80 GiB training takes .* lower `engine.slots`, or a smaller model"):
        plan(256, processes(model, 1), 80 * GIB)
