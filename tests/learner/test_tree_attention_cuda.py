"""On a GPU a tree goes through FlexAttention, and has the gradient of its samples as sequences."""

from random import Random
from typing import Literal

import pytest
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from leyden.config import Hyperparameters, TrainingConfig
from leyden.learner.objective import Objective
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs
from leyden.learner.sample import Sample
from leyden.rl.loss.ppo_clip import ppo_clip

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine")
OBJECTIVE = Objective(ppo_clip, Hyperparameters())
KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 300},
    "gemma3_text": {"sliding_window": 300, "layer_types": ["sliding_attention", "full_attention"]},
}


def small(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}
    config = CONFIG_MAPPING[kind](**shape, **KINDS[kind], initializer_range=0.1, attn_implementation="sdpa")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).cuda().eval()
    return model


def rollouts(turns: int) -> list[Sample]:
    """Four rollouts of a task that go on from turn to turn."""
    rng = Random(0)
    task = tuple(rng.randrange(1, 256) for _ in range(200))
    samples = []
    for rollout in range(4):
        history = task
        for turn in range(turns):
            completion = tuple(rng.randrange(1, 256) for _ in range(rng.randint(20, 60)))
            samples.append(
                Sample(
                    call=f"{rollout}-{turn}",
                    rollout=rollout,
                    call_index=turn,
                    prompt_ids=history,
                    completion_ids=completion,
                    token_indices=range(len(completion)),
                    sampler_logprobs=(-5.0,) * len(completion),
                    temperature=1.0,
                    advantage=rng.uniform(-1, 1),
                    weight=1 / len(completion),
                )
            )
            history = (*history, *completion, *(rng.randrange(1, 256) for _ in range(rng.randint(20, 60))))
    return samples


def gradient(kind: str, samples: list[Sample], layout: Literal["tree", "rows"], compiled: bool) -> torch.Tensor:
    policy = Policy(model := small(kind), TrainingConfig(layout=layout, batch_tokens=8192, compile=compiled))
    assert (model.base_model.layers[0]._compiled_call_impl is not None) == compiled
    policy._cost = replace(policy._cost, tree_token=0.0)  # trees, whatever they share
    policy.accumulate(samples, OldLogprobs(), OBJECTIVE)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("turns", [1, 12], ids=["small", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_has_the_gradient_of_sequences(kind: str, turns: int) -> None:
    samples = rollouts(turns)
    by_rows = gradient(kind, samples, "rows", compiled=False)
    for layout, compiled in ("tree", False), ("tree", True), ("rows", True):
        found = gradient(kind, samples, layout, compiled)
        assert (found - by_rows).norm() <= 1e-4 * by_rows.norm()
