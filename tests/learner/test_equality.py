"""The tree is exact: its loss and every gradient are those of one sample a call, for every loss and kind of model."""

import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from randomness import examples
from smallpolicy import compute_in_double
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, MambaConfig, PreTrainedModel

from leyden.config import AdapterConfig, Hyperparameters, TrainingConfig
from leyden.learner.evaluation import to_arrays
from leyden.learner.objective import Objective
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs
from leyden.learner.sample import Sample
from leyden.rl.correction.masked import masked
from leyden.rl.correction.truncated import truncated
from leyden.rl.divergence import k1, k2, k3
from leyden.rl.loss.cispo import cispo
from leyden.rl.loss.gspo import gspo
from leyden.rl.loss.ppo_clip import ppo_clip
from leyden.rl.loss.reinforce import reinforce

TERMS = Hyperparameters(clip_low=0.1, clip_high=0.1, correction_low=1e-3, correction_high=1e3)
OBJECTIVES = {
    "reinforce": Objective(reinforce, TERMS),
    "ppo_clip": Objective(ppo_clip, TERMS),
    "dual clip": Objective(ppo_clip, Hyperparameters(clip_low=0.1, clip_high=0.1, clip_dual=1.2)),
    "gspo": Objective(gspo, TERMS),
    "cispo": Objective(cispo, TERMS),
    "truncated by token": Objective(ppo_clip, TERMS, truncated, "token"),
    "masked by call": Objective(ppo_clip, TERMS, masked, "call"),
    "truncated by rollout": Objective(ppo_clip, TERMS, truncated, "rollout"),
    "k1": Objective(reinforce, TERMS, kl=k1, kl_weight=0.1),
    "k2": Objective(ppo_clip, TERMS, kl=k2, kl_weight=0.1),
    "k3": Objective(ppo_clip, TERMS, kl=k3, kl_weight=0.1),
    "entropy": Objective(ppo_clip, TERMS, entropy_weight=0.1),
}
SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "attn_implementation": "sdpa",
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}


def small(kind: str, dtype: torch.dtype = torch.float64, spread: float = 0.3) -> PreTrainedModel:
    """A model of a kind; with weights as wide as these every part of it matters, and rounding is blown up."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SHAPE, **MODELS[kind], "initializer_range": spread})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval().to(dtype)
    return model


@pytest.fixture
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_double(monkeypatch, *(kind.removesuffix("_text") for kind in MODELS))


@st.composite
def episodes(draw: Callable[..., Any]) -> list[Sample]:
    """The calls of some rollouts of a task: conversations that go on, branch, are edited, start anew and repeat."""
    rng = Random(draw(st.integers(0, 2**32)))

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, 48) for _ in range(rng.randint(1, most)))

    task = tokens(12)
    samples: list[Sample] = []
    for rollout in range(draw(st.integers(1, 3))):
        history = task
        for turn in range(draw(st.integers(1, 4))):
            completion = tokens(6)
            way = rng.random()
            if way < 0.2 and samples:  # the same as another call, drawn the same or at another temperature
                history, completion = samples[-1].prompt_ids, samples[-1].completion_ids
            elif way < 0.35 and samples:  # a branch off an earlier call
                history = (*rng.choice(samples).prompt_ids, *tokens(4))
            elif way < 0.5 and len(history) > 3:  # an edit of what was said
                at = rng.randrange(1, len(history))
                history = (*history[:at], rng.randrange(1, 48), *history[at + 1 :])
            elif way < 0.6:
                history = tokens(10)
            chosen: Sequence[int] = range(len(completion))
            if rng.random() < 0.3:  # a grammar chose the others
                chosen = sorted(rng.sample(chosen, rng.randint(1, len(chosen))))
            samples.append(
                Sample(
                    call=f"{rollout}-{turn}",
                    rollout=rollout,
                    call_index=turn,
                    prompt_ids=history,
                    completion_ids=completion,
                    token_indices=chosen,
                    sampler_logprobs=tuple(-4 * rng.random() for _ in chosen),
                    temperature=rng.choice((1.0, 1.0, 0.7)),
                    advantage=rng.uniform(-2, 2),
                    weight=rng.random(),
                    target=rng.random(),
                )
            )
            history = (*history, *completion, *tokens(5))
    return samples


def some_before(objective: Objective, policy: Policy, samples: list[Sample]) -> OldLogprobs:
    """A policy that has moved since the step began, so that ratios are not 1 and some are clipped."""
    rng = torch.Generator().manual_seed(1)
    moved = [lp + 0.2 * torch.randn(lp.shape, generator=rng, dtype=lp.dtype) for lp in policy.logprobs(samples)]
    ratio = [0.5 + index / 4 for index in range(len(moved))] if objective.level == "rollout" else None
    return OldLogprobs(to_arrays(moved), to_arrays(policy.reference_logprobs(samples)), ratio)


def both_ways(
    model: PreTrainedModel, samples: list[Sample], objective: Objective, critic: bool = False, **config: Any
) -> Iterator[tuple[float, dict[str, torch.Tensor]]]:
    """Loss and gradients by samples, by trees, by trees that are cut into batches, and by lines."""
    before = None
    for layout, most, as_lines in (
        ("rows", 10_000, False),
        ("tree", 10_000, False),
        ("tree", 64, False),
        ("tree", 64, True),
    ):
        torch.manual_seed(0)
        policy = Policy(model, TrainingConfig(layout=layout, batch_tokens=most, **config), critic, reference=True)
        policy._cost = replace(policy._cost, tree_token=1e9 if as_lines else 0.0)  # which of the two is never in doubt
        assert policy.no_trees_reason is None
        for parameter in policy.extra_parameters.values():  # some begin at zero, and would hide what comes before them
            torch.nn.init.normal_(parameter, std=0.1)
        before = before or some_before(objective, policy, samples)
        metrics = policy.accumulate(samples, before, objective)
        gradients = {name: each.grad for name, each in policy.parameters.items() if each.grad is not None}
        assert len(gradients) == len(policy.parameters)
        policy.optimiser.zero_grad(set_to_none=True)
        yield metrics.loss + (metrics.critic_loss or 0.0), gradients


def single_precision(samples: list[Sample]) -> float:
    """The relative error that float32 gradients may have, whatever the order in which they are added up.

    A gradient is a sum over every token that is computed. Rounding errors of n terms add up like a random walk, to
    sqrt(n) units in the last place; every token passes 2 layers twice, forwards and backwards.
    """
    tokens = sum(len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples)
    return 4 * math.sqrt(max(tokens, SHAPE["hidden_size"])) * torch.finfo(torch.float32).eps


def assert_equal(ways: Iterator[tuple[float, dict[str, torch.Tensor]]], error: float) -> None:
    loss, gradients = next(ways)
    whole = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    for other_loss, others in ways:
        assert other_loss == pytest.approx(loss, rel=error, abs=error)
        for name, gradient in gradients.items():
            assert (others[name] - gradient).norm() <= error * torch.maximum(gradient.norm(), 1e-3 * whole), name


some = settings(max_examples=examples(15, share=7), deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("name", OBJECTIVES)
@some
@given(samples=episodes())
def test_every_loss_has_the_gradient_of_one_sequence_per_call(name: str, samples: list[Sample]) -> None:
    assert_equal(both_ways(small("llama"), samples, OBJECTIVES[name]), 1e-9)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("kind", MODELS)
@some
@given(samples=episodes())
def test_every_kind_of_model_has_the_gradient_of_one_sequence_per_call(kind: str, samples: list[Sample]) -> None:
    assert_equal(both_ways(small(kind), samples, OBJECTIVES["ppo_clip"]), 1e-9)


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize(
    "config",
    [{"critic": True}, {"lora": AdapterConfig(rank=4)}, {"gradient_checkpointing": True}],
    ids=["critic", "lora", "gradient checkpointing"],
)
@some
@given(samples=episodes())
def test_a_critic_adapters_and_checkpointing_change_nothing_of_that(
    config: dict[str, Any], samples: list[Sample]
) -> None:
    assert_equal(both_ways(small("llama"), samples, OBJECTIVES["k3"], **config), 1e-9)


@pytest.mark.parametrize(  # the others' layers are computed in double precision above
    "kind",
    [pytest.param(kind, marks=[] if kind in ("llama", "gemma3_text") else [pytest.mark.slow]) for kind in MODELS],
)
@some
@given(samples=episodes())
def test_models_as_they_are_agree_to_single_precision(kind: str, samples: list[Sample]) -> None:
    assert_equal(both_ways(small(kind, spread=0.1), samples, OBJECTIVES["ppo_clip"]), single_precision(samples))


@pytest.mark.usefixtures("in_double")
@some
@given(samples=episodes())
def test_the_critics_values_are_those_of_one_sequence_per_call(samples: list[Sample]) -> None:
    found = []
    for layout in "rows", "tree":
        torch.manual_seed(0)
        policy = Policy(small("llama"), TrainingConfig(layout=layout), critic=True)
        assert policy.critic is not None
        torch.nn.init.normal_(policy.critic.outer.weight)
        found.append(policy.evaluate(samples).values)
    assert found[0] == pytest.approx(found[1], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("layout", ["rows", "tree"])
def test_what_a_grammar_chose_is_context(layout: str) -> None:
    policy = Policy(small("llama"), TrainingConfig(layout=layout))
    whole = {
        "call": "a",
        "rollout": 0,
        "call_index": 0,
        "prompt_ids": (1, 2),
        "completion_ids": (3, 4, 5),
        "temperature": 1.0,
    }
    chosen = Sample(**whole, token_indices=(0, 2), sampler_logprobs=(-1.0, -2.0), advantage=1.5, weight=0.5)
    logprobs = policy.logprobs([Sample(**whole, token_indices=range(3), sampler_logprobs=(-1.0,) * 3)])[0]
    torch.testing.assert_close(policy.logprobs([chosen])[0], logprobs[[0, 2]])
    before = OldLogprobs([np.array(chosen.sampler_logprobs, np.float32)])
    assert policy.accumulate([chosen], before, OBJECTIVES["reinforce"]).tokens == 2
    found = {name: each.grad.clone() for name, each in policy.parameters.items() if each.grad is not None}
    policy.optimiser.zero_grad(set_to_none=True)
    logits = policy.model(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits[0]
    (-1.5 * 0.5 * (logits[1].log_softmax(-1)[3] + logits[3].log_softmax(-1)[5])).backward()
    for name, each in policy.parameters.items():
        torch.testing.assert_close(found[name], each.grad)


def test_a_model_whose_layers_are_not_attention_is_computed_by_sequences_and_says_why() -> None:
    config = MambaConfig(vocab_size=48, hidden_size=16, state_size=4, num_hidden_layers=2)
    policy = Policy(AutoModelForCausalLM.from_config(config).eval(), TrainingConfig())
    assert policy.no_trees_reason is not None and "linear_attention" in policy.no_trees_reason
    sample = Sample(
        call="a",
        rollout=0,
        call_index=0,
        prompt_ids=(1, 2, 3),
        completion_ids=(4, 5),
        token_indices=(0, 1),
        sampler_logprobs=(-1.0, -1.0),
        temperature=1.0,
    )
    logits = policy.model(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 2:4]
    expected = torch.log_softmax(logits, -1)[[0, 1], [4, 5]]
    torch.testing.assert_close(policy.logprobs([sample])[0], expected.detach())
