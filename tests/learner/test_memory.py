"""What training takes of the devices and of the host is what it then holds; what does not fit is refused."""

from typing import Any

import pytest
import torch
from smallpolicy import OBJECTIVE, some_samples
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from leyden.config import AdapterConfig, ConfigError, TrainingConfig
from leyden.learner.memory import check_memory, gathered_units, memory_for_training
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
OFFLOADED = TrainingConfig(offload="optimiser")
LORA = AdapterConfig(rank=4, modules=("q_proj", "down_proj"))


def make(**options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, **options}))
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("training", [TrainingConfig(), TrainingConfig(lora=LORA), OFFLOADED], ids=["", "lora", "host"])
@pytest.mark.parametrize("reference", [False, True])
def test_the_memory_for_training_is_what_training_holds(dtype: str, training: TrainingConfig, reference: bool) -> None:
    model = make().to(getattr(torch, dtype))
    expected = memory_for_training(model, dtype, training, reference)
    policy = Policy(model, training, reference=reference)
    copies = {id(policy.served): policy.served, id(policy.model): policy.model}
    if reference and policy._reference is not None:
        copies[id(policy._reference._model)] = policy._reference._model
    policy.accumulate(some_samples(), OldLogprobs(), OBJECTIVE)
    gradients = list(policy.masters.gradients)
    policy.masters.step(policy.optimiser)
    moments = [each for state in policy.optimiser.state.values() for each in state.values() if each.ndim]
    weights = {id(each): each for copy in copies.values() for each in copy.parameters()}
    masters = {id(each): each for each in policy.trained.values() if id(each) not in weights}
    device, host = [*gradients, *weights.values()], [*masters.values(), *moments]
    if training.offload == "optimiser":
        assert expected.host == sum(each.nbytes for each in host) + 16 * 64 * 32  # the largest parameter, on its way
    else:
        device, host = device + host, []
    assert expected.device == sum(each.nbytes for each in device)


def test_the_memory_for_training_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tie_word_embeddings=True)
    weights = model.num_parameters()
    adapters = 2 * 4 * ((32 + 32) + (48 + 32))  # layers, rank, and the two sides of q_proj and of down_proj
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert weights == 64 * 32 + 2 * layer + 32

    def device(dtype: str, reference: bool = False, **training: Any) -> int:
        return memory_for_training(model, dtype, TrainingConfig(**training), reference).device

    assert device("float32") == 16 * weights
    assert device("float32", reference=True) == 20 * weights
    assert device("bfloat16") == 18 * weights
    assert device("float32", True, lora=LORA) == 8 * weights + 16 * adapters
    assert device("bfloat16", lora=LORA) == 4 * weights + 16 * adapters
    assert device("bfloat16", offload="optimiser") == 6 * weights
    sharded, adapted = 4 * weights, (2 * weights + 16 * adapters) // 4
    assert device("bfloat16", devices=4) == sharded + 6 * weights
    assert device("bfloat16", devices=4, lora=LORA) == adapted + 2 * weights
    monkeypatch.setattr("leyden.learner.memory.keeps_whole", lambda size: False)
    assert device("bfloat16", devices=4) == sharded + 6 * weights  # two layers and what is beside them are all of it
    assert device("bfloat16", devices=4, lora=LORA) == adapted + 6 * weights


def test_small_layers_are_gathered_together_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(num_hidden_layers=5)
    layers = list(model.model.layers)
    size = sum(each.numel() for each in layers[0].parameters())
    monkeypatch.setattr("leyden.learner.memory._UNIT_BYTES", 2 * 4 * size)
    assert gathered_units(model, 4) == [layers[:2], layers[2:4], layers[4:]]
    assert gathered_units(model, 2) == [layers[:4], layers[4:]]
    monkeypatch.setattr("leyden.learner.memory._UNIT_BYTES", size)
    assert gathered_units(model, 4) == [[layer] for layer in layers]


def test_a_refusal_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    weights = model.num_parameters()

    def check(dtype: str, free: int, where: str, on_gpu: int = 0, **training: Any) -> None:
        monkeypatch.setattr("leyden.learner.memory.free_memory", lambda: free * weights)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda number: (on_gpu * weights, 0))
        check_memory("small", model, dtype, TrainingConfig(**training), False, torch.device(where))

    check("float32", 16, "cpu")
    check("bfloat16", 0, "cuda", 18)
    check("bfloat16", 14, "cuda", 6, offload="optimiser")
    check("bfloat16", 4, "cuda", 9, devices=6)
    with pytest.raises(ConfigError, match=r"of host memory .* a smaller model, a larger machine or `training.lora`$"):
        check("float32", 15, "cpu")
    with pytest.raises(ConfigError, match=r'a larger machine or `engine.dtype = "bfloat16"`$'):
        check("float32", 4, "cpu", lora=LORA)
    with pytest.raises(ConfigError, match=r"use a smaller model or a larger machine$"):
        check("bfloat16", 3, "cpu", lora=LORA)
    with pytest.raises(ConfigError, match=r'of GPU memory .*, `training.offload = "optimiser"` or `training.lora`$'):
        check("bfloat16", 14, "cuda", 17)
    with pytest.raises(ConfigError, match=r"of host memory .* a larger machine or `training.lora`$"):
        check("bfloat16", 11, "cuda", 6, offload="optimiser")
    with pytest.raises(ConfigError, match=r"of host memory"):
        check("bfloat16", 3, "cuda", 9, devices=6)  # rank 0 reads the model
