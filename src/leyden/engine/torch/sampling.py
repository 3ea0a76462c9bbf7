"""Samples one token for each request of a step.

Applied in this order: penalties (repetition over prompt and completion, presence and frequency over the completion),
temperature, the grammar, top_k, top_p of the remaining tokens, min_p. Logprobs are those of the resulting distribution,
renormalised. At temperature 0 the most likely token is chosen, and logprobs are those at temperature 1.

Each request has its own random generator, seeded by the request, and uses one number per token: it selects the token
at that point of the cumulative distribution. The result does not depend on the rest of the batch, up to rounding.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leyden.engine.grammar import GrammarMatcher
from leyden.records import Sampling

MIN_TEMPERATURE = 1e-30
"""float32 cannot divide by less. Far above this, sampling already picks only the most likely token."""

TopLogprobs = tuple[tuple[int, float], ...]


class SampledToken(NamedTuple):
    """One token."""

    id: int
    logprob: float
    top: TopLogprobs | None
    allowed: float
    """The probability of all tokens that the grammar allowed; 0 where it allowed a single one."""


class TokenSampler:
    """Samples one request: holds its settings, random numbers and grammar, and the token counts for penalties."""

    def __init__(
        self,
        sampling: Sampling,
        top_logprobs: int,
        prompt_ids: Sequence[int],
        vocabulary: int,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.matcher = matcher
        self.sampling, self.top_logprobs = sampling, min(top_logprobs, vocabulary)
        self.greedy = sampling.temperature == 0
        self.temperature = 1.0 if self.greedy else max(sampling.temperature, MIN_TEMPERATURE)
        self.uniform = random.Random(sampling.seed).random
        self.truncates = 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.min_p > 0
        self.penalises = bool(
            sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        )
        self.plain = not (self.truncates or self.penalises or self.greedy or self.top_logprobs or matcher)
        if self.penalises:
            self._counts = torch.zeros(vocabulary)
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[list(prompt_ids)] = True

    def penalise(self, logits: Tensor) -> Tensor:
        """Return logits of [vocabulary] after the penalties."""
        device, sampling = logits.device, self.sampling
        seen, counts = self._seen.to(device), self._counts.to(device)
        strength = sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / strength, logits * strength)
        logits = torch.where(seen, repeated, logits)
        return logits - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)

    def accept(self, id: int) -> None:
        """Update penalties and grammar with a sampled token."""
        if self.penalises:
            self._counts[id] += 1
            self._seen[id] = True
        if self.matcher is not None:
            self.matcher.accept(id)


def sample_tokens(logits: Tensor, samplers: Sequence[TokenSampler]) -> list[SampledToken]:
    """Sample a token from each row of [request, vocabulary]. May overwrite the logits."""
    plain = all(sampler.plain for sampler in samplers)
    if not plain:
        for index, sampler in enumerate(samplers):
            if sampler.penalises:
                logits[index] = sampler.penalise(logits[index])
    if any(sampler.temperature != 1 for sampler in samplers):
        highest = logits.amax(-1, keepdim=True)  # subtracted first, so that nothing overflows
        logits = (logits - highest) / _column([sampler.temperature for sampler in samplers], logits)
    allowed = [1.0] * len(samplers)
    if not plain and (matchers := {i: one.matcher for i, one in enumerate(samplers) if one.matcher is not None}):
        logits[list(matchers)], masses = constrain(logits[list(matchers)], list(matchers.values()))
        for index, mass in zip(matchers, masses, strict=True):
            allowed[index] = mass
    if not plain and (truncated := [index for index, sampler in enumerate(samplers) if sampler.truncates]):
        logits[truncated] = truncate(logits[truncated], [samplers[index].sampling for index in truncated])
    logprobs = torch.log_softmax(logits, -1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    uniform = torch.tensor([sampler.uniform() for sampler in samplers], dtype=torch.float64, device=logits.device)
    ids = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    if not plain:
        greedy = torch.tensor([[sampler.greedy] for sampler in samplers], device=logits.device)
        ids = torch.where(greedy, logprobs.argmax(-1, keepdim=True), ids)
    ids.clamp_(max=logits.shape[-1] - 1)  # past the end only where logits are not finite; the logprob shows that
    chosen = logprobs.gather(-1, ids)
    tops: Sequence[TopLogprobs | None] = [None] * len(samplers) if plain else _tops(logprobs, samplers)
    tokens = [SampledToken(*one) for one in zip(ids[:, 0].tolist(), chosen[:, 0].tolist(), tops, allowed, strict=True)]
    if not plain:
        for sampler, token in zip(samplers, tokens, strict=True):
            sampler.accept(token.id)
    return tokens


def constrain(logits: Tensor, matchers: Sequence[GrammarMatcher]) -> tuple[Tensor, list[float]]:
    """Set the logits of [request, vocabulary] that grammars forbid to minus infinity.

    Also returns the probability of the allowed tokens for each request: 0 where a single one is allowed, since the
    model does not choose it.
    """
    bits = np.stack([np.frombuffer(matcher.allowed_bitmask(), np.uint8) for matcher in matchers])
    allowed = torch.from_numpy(np.unpackbits(bits, axis=1, count=logits.shape[-1], bitorder="little"))
    allowed = allowed.to(logits.device, torch.bool)
    masses = logits.softmax(-1).masked_fill(~allowed, 0).sum(-1, dtype=torch.float64).clamp(max=1)
    masses[allowed.count_nonzero(-1) <= 1] = 0
    return logits.masked_fill(~allowed, -torch.inf), masses.round(decimals=6).tolist()


def truncate(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Set the logits of [request, vocabulary] that top_k, top_p and min_p exclude to minus infinity."""
    vocabulary = logits.shape[-1]
    top_k = _column([one.top_k if 0 < one.top_k < vocabulary else vocabulary for one in samplings], logits)
    top_p, min_p = _column([one.top_p for one in samplings], logits), _column([one.min_p for one in samplings], logits)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=logits.device)
    probabilities = ordered.masked_fill(rank >= top_k, -torch.inf).softmax(-1)
    mass_above = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    excluded = (rank >= top_k) | (mass_above >= top_p) | (probabilities < min_p * probabilities[:, :1])
    excluded[:, 0] = False
    return logits.masked_fill(torch.zeros_like(excluded).scatter_(-1, index, excluded), -torch.inf)


def _tops(logprobs: Tensor, samplers: Sequence[TokenSampler]) -> list[TopLogprobs | None]:
    """Return the most likely tokens where requested, without those of probability 0."""
    most = max(sampler.top_logprobs for sampler in samplers)
    tops: list[TopLogprobs | None] = [None] * len(samplers)
    if most:
        values, ids = logprobs.topk(most)
        for index, (sampler, row) in enumerate(
            zip(samplers, zip(ids.tolist(), values.tolist(), strict=True), strict=True)
        ):
            if sampler.top_logprobs:
                likeliest = zip(*(part[: sampler.top_logprobs] for part in row), strict=True)
                tops[index] = tuple((id, value) for id, value in likeliest if value > -torch.inf)
    return tops


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
