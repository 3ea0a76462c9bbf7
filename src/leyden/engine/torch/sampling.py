"""Drawing one token for each request of a step.

In this order: penalties (repetition over prompt and completion, presence and frequency over the completion), then
temperature, the grammar, top_k, top_p of what is left, min_p. Logprobs are of the distribution that results,
renormalised. At temperature 0 the likeliest token is taken, and logprobs are those at temperature 1.

A request has a generator of its own, seeded by its seed, and takes one number a token: the token at that share of the
cumulative distribution. What it draws does not depend on who else is in the batch, up to rounding.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leyden.engine.grammar import Matcher
from leyden.records import Sampling

COLDEST = 1e-30
"""Below this a temperature is no number that float32 can divide by; long before, it draws only the likeliest."""

Top = tuple[tuple[int, float], ...]


class SampledToken(NamedTuple):
    """One token."""

    id: int
    logprob: float
    top: Top | None
    allowed: float
    """How likely the tokens were together that the grammar allowed; 0 where it was a single one."""


class TokenSampler:
    """How one request's tokens are drawn: its sampling, random numbers and grammar, and what penalties have to know."""

    def __init__(
        self,
        sampling: Sampling,
        top_logprobs: int,
        prompt_ids: Sequence[int],
        vocabulary: int,
        matcher: Matcher | None = None,
    ) -> None:
        self.matcher = matcher
        self.sampling, self.top_logprobs = sampling, min(top_logprobs, vocabulary)
        self.greedy = sampling.temperature == 0
        self.temperature = 1.0 if self.greedy else max(sampling.temperature, COLDEST)
        self.uniform = random.Random(sampling.seed).random
        self.truncates = 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.min_p > 0
        self.penalises = bool(
            sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        )
        self.plain = not (self.truncates or self.penalises or self.greedy or self.top_logprobs or matcher)
        if self.penalises:
            self._drawn = torch.zeros(vocabulary)
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[list(prompt_ids)] = True

    def penalise(self, logits: Tensor) -> Tensor:
        """Logits of [vocabulary] after the penalties."""
        device, sampling = logits.device, self.sampling
        seen, drawn = self._seen.to(device), self._drawn.to(device)
        strength = sampling.repetition_penalty
        repeated = torch.where(logits > 0, logits / strength, logits * strength)
        logits = torch.where(seen, repeated, logits)
        return logits - sampling.frequency_penalty * drawn - sampling.presence_penalty * (drawn > 0)

    def note(self, id: int) -> None:
        """Remember a token that was drawn."""
        if self.penalises:
            self._drawn[id] += 1
            self._seen[id] = True
        if self.matcher is not None:
            self.matcher.take(id)


def draw(logits: Tensor, chances: Sequence[TokenSampler]) -> list[SampledToken]:
    """Draw a token from each row of [request, vocabulary]; the logits may be overwritten."""
    plain = all(chance.plain for chance in chances)
    if not plain:
        for index, chance in enumerate(chances):
            if chance.penalises:
                logits[index] = chance.penalise(logits[index])
    if any(chance.temperature != 1 for chance in chances):
        highest = logits.amax(-1, keepdim=True)  # taken off first, so that nothing overflows
        logits = (logits - highest) / _column([chance.temperature for chance in chances], logits)
    allowed = [1.0] * len(chances)
    if not plain and (bound := {index: one.matcher for index, one in enumerate(chances) if one.matcher is not None}):
        logits[list(bound)], left = constrain(logits[list(bound)], list(bound.values()))
        for index, share in zip(bound, left, strict=True):
            allowed[index] = share
    if not plain and (some := [index for index, chance in enumerate(chances) if chance.truncates]):
        logits[some] = truncate(logits[some], [chances[index].sampling for index in some])
    logprobs = torch.log_softmax(logits, -1)
    shares = logprobs.exp().cumsum(-1, dtype=torch.float64)
    uniform = torch.tensor([chance.uniform() for chance in chances], dtype=torch.float64, device=logits.device)
    ids = torch.searchsorted(shares, uniform[:, None] * shares[:, -1:], right=True)
    if not plain:
        greedy = torch.tensor([[chance.greedy] for chance in chances], device=logits.device)
        ids = torch.where(greedy, logprobs.argmax(-1, keepdim=True), ids)
    ids.clamp_(max=logits.shape[-1] - 1)  # only past the end where logits are not numbers; its logprob says so
    own = logprobs.gather(-1, ids)
    tops: Sequence[Top | None] = [None] * len(chances) if plain else _tops(logprobs, chances)
    drawn = [SampledToken(*one) for one in zip(ids[:, 0].tolist(), own[:, 0].tolist(), tops, allowed, strict=True)]
    if not plain:
        for chance, one in zip(chances, drawn, strict=True):
            chance.note(one.id)
    return drawn


def constrain(logits: Tensor, matchers: Sequence[Matcher]) -> tuple[Tensor, list[float]]:
    """Logits of [request, vocabulary] with minus infinity for what grammars forbid, and how likely the rest was.

    That is 0 where the rest is a single token: it was not chosen.
    """
    bits = np.stack([np.frombuffer(matcher.allowed(), np.uint8) for matcher in matchers])
    allowed = torch.from_numpy(np.unpackbits(bits, axis=1, count=logits.shape[-1], bitorder="little"))
    allowed = allowed.to(logits.device, torch.bool)
    shares = logits.softmax(-1).masked_fill(~allowed, 0).sum(-1, dtype=torch.float64).clamp(max=1)
    shares[allowed.count_nonzero(-1) <= 1] = 0
    return logits.masked_fill(~allowed, -torch.inf), shares.round(decimals=6).tolist()


def truncate(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits of [request, vocabulary] with minus infinity for what top_k, top_p and min_p leave out."""
    vocabulary = logits.shape[-1]
    top_k = _column([one.top_k if 0 < one.top_k < vocabulary else vocabulary for one in samplings], logits)
    top_p, min_p = _column([one.top_p for one in samplings], logits), _column([one.min_p for one in samplings], logits)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=logits.device)
    probabilities = ordered.masked_fill(rank >= top_k, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    out = (rank >= top_k) | (before >= top_p) | (probabilities < min_p * probabilities[:, :1])
    out[:, 0] = False
    return logits.masked_fill(torch.zeros_like(out).scatter_(-1, index, out), -torch.inf)


def _tops(logprobs: Tensor, chances: Sequence[TokenSampler]) -> list[Top | None]:
    """The likeliest tokens where they were asked for, less those that cannot be drawn."""
    most = max(chance.top_logprobs for chance in chances)
    tops: list[Top | None] = [None] * len(chances)
    if most:
        values, ids = logprobs.topk(most)
        for index, (chance, row) in enumerate(
            zip(chances, zip(ids.tolist(), values.tolist(), strict=True), strict=True)
        ):
            if chance.top_logprobs:
                likeliest = zip(*(some[: chance.top_logprobs] for some in row), strict=True)
                tops[index] = tuple((id, value) for id, value in likeliest if value > -torch.inf)
    return tops


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
