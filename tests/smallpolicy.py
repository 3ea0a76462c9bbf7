"""A model small enough for a test, and samples for it."""

import asyncio
from importlib import import_module
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import LlamaConfig, LlamaForCausalLM

from leyden.config import Config, Hyperparameters, TrainingConfig
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.objective import Objective, objective_of
from leyden.learner.policy import Policy
from leyden.learner.protocol import Update
from leyden.learner.sample import Sample
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.orchestrator.credit.samples import Groups, StepAccounting
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.updates import UpdateBuilder
from leyden.rl.loss.ppo_clip import ppo_clip

OBJECTIVE = Objective(ppo_clip, Hyperparameters())


def small_policy(
    seed: int = 0,
    critic: bool = False,
    reference: bool = False,
    dtype: torch.dtype = torch.float32,
    **training: object,
) -> Policy:
    """A policy with random weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval().to(dtype)
    config = TrainingConfig(**{"learning_rate": 1e-2, **training})
    return Policy(model, config, critic, reference)


class _Double:
    """torch, but for the module that sees it single precision is double."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def compute_in_double(monkeypatch: pytest.MonkeyPatch, *families: str) -> None:
    """Compute norms and rotary embeddings in double, which models compute in single precision whatever their own."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for family in families:
        monkeypatch.setattr(import_module(f"transformers.models.{family}.modeling_{family}"), "torch", _Double())


def prepare_updates(
    groups: Groups, number: int, policy: Policy, config: Config, accounting: StepAccounting, epochs: int = 1
) -> list[Update]:
    """Prepare updates as a run does, with the learner in this process."""
    training = replace(config.training, updates_per_step=number, epochs=epochs)
    trained = TrainedPolicy(policy, objective_of(config), checkpoints=None)
    with LocalLearner({config.policy: trained}) as learner:
        builder = UpdateBuilder(learner, config.policy, algorithm_of(config), training, Publications(0, [0]))
        return asyncio.run(builder.prepare(groups, accounting))


def some_samples(number: int = 7, seed: int = 0) -> list[Sample]:
    """Samples of any length, some of which begin like others."""
    rng = Random(seed)
    samples: list[Sample] = []
    for index in range(number):
        tokens = rng.randint(1, 12)
        shared = rng.choice([(), *((*sample.prompt_ids, *sample.completion_ids) for sample in samples)])
        shared = shared[: rng.randint(0, len(shared))]
        samples.append(
            Sample(
                call=f"call-{index}",
                rollout=index // 2,
                call_index=index % 2,
                prompt_ids=(*shared, *(rng.randrange(64) for _ in range(rng.randint(1, 30)))),
                completion_ids=tuple(rng.randrange(64) for _ in range(tokens)),
                token_indices=range(tokens),
                sampler_logprobs=tuple(-rng.random() * 5 for _ in range(tokens)),
                temperature=rng.choice((1.0, 0.7)),
                advantage=rng.uniform(-2, 2),
                weight=rng.random() / tokens,
            )
        )
    return samples
