"""Compiled layers compute what the layers compute, and equal layers are compiled once, for any number of tokens."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_mask import dense_mask
from smallpolicy import OBJECTIVE, small_policy, some_samples
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from leyden.config import AdapterConfig
from leyden.learner.compilation import compile_layers
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs
from leyden.learner.tree_attention import TreeMasks, _block_mask


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> None:
    torch._dynamo.reset()


def accumulate(policy: Policy, number: int) -> None:
    """Accumulate the gradient of so many samples on another thread than the policy's, as the trainer does."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(policy.accumulate, some_samples(number, seed=number), OldLogprobs(), OBJECTIVE).result()


def gradients(policy: Policy) -> list[torch.Tensor]:
    for number in (3, 7, 11):
        accumulate(policy, number)
    return [each.grad for each in policy.trained.values() if each.grad is not None]


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_checkpointing": True}, {"lora": AdapterConfig(rank=4)}], ids=["plain", "again", "lora"]
)
def test_all_layers_share_what_is_compiled_and_have_the_same_gradient(settings: dict[str, Any]) -> None:
    as_written, compiled = (small_policy(layout="rows", **settings) for _ in range(2))
    counter = CompileCounter()
    compile_layers(compiled.model, counter)
    for ours, theirs in zip(gradients(compiled), gradients(as_written), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert counter.frame_count == 1  # of two layers and three batches of different shapes


def test_the_numbers_of_a_layer_are_constants_of_what_is_compiled() -> None:
    policy = small_policy(layout="rows", lora=AdapterConfig(rank=4))
    numbers: list[str] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        numbers.extend(node.name for node in module.graph.nodes if node.op == "placeholder" and is_number(node))
        return module.forward

    compile_layers(policy.model, backend)
    accumulate(policy, 3)
    assert numbers == []


def test_of_a_sharded_layer_only_numbers_of_tokens_vary(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = small_policy(layout="rows").model
        varying: list[int] = []

        def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            varying.extend(each.node.hint for each in inputs if isinstance(each, torch.SymInt))
            return module.forward

        for layer in model.model.layers:
            fully_shard(layer)
        compile_layers(model, backend)
        for width in (20, 30, 40):
            model(torch.arange(width)[None], use_cache=False)
    finally:
        torch.distributed.destroy_process_group()
    assert set(varying) == {30}  # from the second width on, for which the layers are compiled once more


def is_number(node: torch.fx.Node) -> bool:
    value = node.meta["example_value"]
    return isinstance(value, torch.Tensor) and value.ndim == 0


@torch.no_grad()
def test_block_masks_of_different_trees_share_what_is_compiled() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    compiled = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape)).eval()
    as_written = deepcopy(compiled)
    for model in compiled, as_written:
        TreeMasks(model)
    counter = CompileCounter()
    compile_layers(compiled, counter)
    for width in (256, 384, 512):
        depths = torch.arange(width)[None]
        ends = torch.where(depths < width // 2, width, depths + 1)  # a shared half, then leaves
        ids = torch.randint(64, (1, width))
        ours, theirs = (
            model(ids, attention_mask=build(ends, depths, None), position_ids=depths, use_cache=False).logits
            for model, build in ((compiled, _block_mask), (as_written, dense_mask))
        )
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1
