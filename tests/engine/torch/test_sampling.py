"""Sampling: the right distribution, its logprobs, and the same tokens for the same seed."""

import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from leyden.engine.torch.sampling import SampledToken, TokenSampler, sample_tokens
from leyden.records import Sampling

VOCABULARY = 50


def logits(seed: int = 0) -> Tensor:
    return 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))


def reference(raw: Tensor, sampling: Sampling, prompt: list[int], sampled: list[int]) -> list[float]:
    """The distribution, token by token, as the definitions say."""
    scores = raw.tolist()
    for id in set(prompt) | set(sampled):
        penalty = sampling.repetition_penalty
        scores[id] = scores[id] / penalty if scores[id] > 0 else scores[id] * penalty
    for id, count in Counter(sampled).items():
        scores[id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    scores = [score / (sampling.temperature or 1.0) for score in scores]
    order = sorted(range(len(scores)), key=lambda id: -scores[id])
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = sum(math.exp(scores[id]) for id in order)
    kept, mass = [], 0.0
    for id in order:
        if kept and mass >= sampling.top_p:
            break
        mass += math.exp(scores[id]) / total
        kept.append(id)
    kept = [id for id in kept if math.exp(scores[id] - scores[kept[0]]) >= sampling.min_p]
    total = sum(math.exp(scores[id]) for id in kept)
    return [math.exp(scores[id]) / total if id in kept else 0.0 for id in range(len(scores))]


def sample_one(raw: Tensor, sampler: TokenSampler) -> SampledToken:
    (sampled,) = sample_tokens(raw.clone()[None], [sampler]).read()
    return sampled


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.6, top_k=5),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1),
        Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
        Sampling(top_p=1e-9),
        Sampling(repetition_penalty=1.4),
        Sampling(presence_penalty=1.0, frequency_penalty=0.5),
        Sampling(temperature=0.8, top_p=0.9, repetition_penalty=0.7, presence_penalty=-0.5),
    ],
)
def test_logprobs_are_of_the_distribution_that_was_sampled_from(sampling: Sampling) -> None:
    prompt, sampled = [1, 2, 3, 3], []
    sampler = TokenSampler(sampling, VOCABULARY, prompt, VOCABULARY)
    for step in range(20):
        expected = reference(logits(step), sampling, prompt, sampled)
        one = sample_one(logits(step), sampler)
        assert one.top is not None
        assert dict(one.top).keys() == {id for id, share in enumerate(expected) if share > 0}
        for id, logprob in one.top:
            assert logprob == pytest.approx(math.log(expected[id]), abs=1e-4)
        assert one.logprob == dict(one.top)[one.id]
        sampled.append(one.id)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.5), Sampling(top_k=6, top_p=0.95)])
def test_tokens_come_as_often_as_their_probability_says(sampling: Sampling) -> None:
    many = 20_000
    samplers = [
        TokenSampler(Sampling(**{**_fields(sampling), "seed": seed}), 0, [], VOCABULARY) for seed in range(many)
    ]
    counts = Counter(one.id for one in sample_tokens(logits().repeat(many, 1), samplers).read())
    for id, share in enumerate(reference(logits(), sampling, [], [])):
        assert abs(counts[id] / many - share) <= 5 * math.sqrt(share * (1 - share) / many)


def test_greedy_takes_the_likeliest_and_gives_its_logprob_at_temperature_1() -> None:
    one = sample_one(logits(), TokenSampler(Sampling(temperature=0.0), 3, [], VOCABULARY))
    expected = torch.log_softmax(logits(), -1)
    assert one.id == int(expected.argmax())
    assert one.logprob == pytest.approx(float(expected.max()), abs=1e-5)
    assert one.top is not None
    assert [id for id, _ in one.top] == expected.topk(3).indices.tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-40])
def test_a_temperature_near_0_is_no_overflow(temperature: float) -> None:
    one = sample_one(100 * logits(), TokenSampler(Sampling(temperature=temperature), 0, [], VOCABULARY))
    assert (one.id, one.logprob) == (int(logits().argmax()), 0.0)


def test_a_seed_samples_the_same_tokens_whatever_else_is_in_the_batch() -> None:
    def many(others: list[Sampling]) -> list[int]:
        samplers = [
            TokenSampler(Sampling(seed=7), 0, [], VOCABULARY),
            *(TokenSampler(one, 2, [], VOCABULARY) for one in others),
        ]
        return [sample_tokens(logits(step).repeat(len(samplers), 1), samplers).read()[0].id for step in range(30)]

    alone = many([])
    assert alone == many([Sampling(seed=1), Sampling(temperature=0.3, top_p=0.5), Sampling(frequency_penalty=2.0)])
    assert len(set(alone)) > 5


def test_without_a_seed_no_two_requests_sample_alike() -> None:
    samplers = [TokenSampler(Sampling(), 0, [], VOCABULARY) for _ in range(2)]
    sampled = [[one.id for one in sample_tokens(torch.zeros(2, VOCABULARY), samplers).read()] for _ in range(20)]
    first, second = zip(*sampled, strict=True)
    assert first != second


@pytest.mark.parametrize("vocabulary", [2048, 5001])
def test_a_vocabulary_of_several_blocks_is_sampled_at_the_same_points_of_its_distribution(vocabulary: int) -> None:
    many = 300
    raw = 3 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(1))
    raw[torch.randperm(vocabulary, generator=torch.Generator().manual_seed(2))[: vocabulary // 2]] = -torch.inf
    samplers = [TokenSampler(Sampling(seed=seed), 0, [], vocabulary) for seed in range(many)]
    sampled = sample_tokens(raw.repeat(many, 1), samplers).read()
    cumulative = raw.double().softmax(-1).cumsum(-1)
    for seed, token in enumerate(sampled):
        point = random.Random(seed).random()
        before = cumulative[token.id - 1] if token.id else 0.0
        assert before - 1e-6 <= point <= cumulative[token.id] + 1e-6
        assert token.logprob == pytest.approx(float(raw.log_softmax(-1)[token.id]), abs=1e-5)
        assert math.isfinite(token.logprob)


def _fields(sampling: Sampling) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
