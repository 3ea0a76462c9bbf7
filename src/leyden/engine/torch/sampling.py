"""Samples one token for each request of a step, on the device of the logits.

Applied in this order: penalties (repetition over prompt and completion, presence and frequency over the completion),
temperature, the grammar, top_k, top_p of the remaining tokens, min_p. Logprobs are those of the resulting distribution,
renormalised. At temperature 0 the most likely token is chosen, and logprobs are those at temperature 1.

Each request has its own random generator, seeded by the request, and uses one number per token: it selects the token
at that point of the cumulative distribution. The result does not depend on the rest of the batch, up to rounding.
Nothing here waits for the device but `SampledBatch.read`, which needs one copy.
"""

import math
import random
from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from leyden.engine.grammar import GrammarMatcher
from leyden.engine.torch.transfer import HostCopy, to_device
from leyden.records import Sampling

MIN_TEMPERATURE = 1e-30
"""float32 cannot divide by less. Far above this, sampling already picks only the most likely token."""
CUMULATIVE_BLOCK = 1024
"""Vocabularies of several blocks are summed up block by block: a float64 sum over all of it is slow on a GPU."""

TopLogprobs = tuple[tuple[int, float], ...]


class SampledToken(Struct, frozen=True, gc=False):
    """One token."""

    id: int
    logprob: float
    top: TopLogprobs | None
    allowed: float
    """The probability of all tokens that the grammar allowed; 0 if it allowed a single one."""


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
        self.needs_tokens = self.penalises or matcher is not None
        """Whether a token can be sampled only after the host has read the one before."""
        if self.penalises:
            self._counts = torch.zeros(vocabulary)
            self._seen = torch.zeros(vocabulary, dtype=torch.bool)
            self._seen[list(prompt_ids)] = True

    def penalise(self, logits: Tensor) -> Tensor:
        """Return logits of [vocabulary] after the penalties."""
        sampling, strength = self.sampling, self.sampling.repetition_penalty
        self._seen, self._counts = self._seen.to(logits.device), self._counts.to(logits.device)
        repeated = torch.where(logits > 0, logits / strength, logits * strength)
        logits = torch.where(self._seen, repeated, logits)
        return logits - sampling.frequency_penalty * self._counts - sampling.presence_penalty * (self._counts > 0)

    def accept(self, id: int) -> None:
        """Update penalties and grammar with a sampled token."""
        if self.penalises:
            self._counts[id] += 1
            self._seen[id] = True
        if self.matcher is not None:
            self.matcher.accept(id)


class SampledBatch:
    """The sampled tokens of a step, which the device may still be computing."""

    def __init__(self, ids: Tensor, values: Tensor, samplers: Sequence[TokenSampler], tops: int) -> None:
        """`values` has the columns id and logprob; unless all samplers are plain allowed, `tops` ids and logprobs."""
        self.ids = ids
        """[request], on the device."""
        self._samplers, self._tops = samplers, tops
        self._values = HostCopy(values)

    def read(self) -> list[SampledToken]:
        """Wait for the tokens, and update penalties and grammars with them; call it once."""
        values = self._values.wait().tolist()
        if len(values[0]) == 2:
            return [SampledToken(int(id), logprob, None, 1.0) for id, logprob in values]
        tokens = []
        for sampler, (id, logprob, allowed, *tops) in zip(self._samplers, values, strict=True):
            top: TopLogprobs | None = None
            if sampler.top_logprobs:
                likeliest = zip(tops[: sampler.top_logprobs], tops[self._tops :], strict=False)
                top = tuple((int(one), value) for one, value in likeliest if value > -torch.inf)
            tokens.append(SampledToken(int(id), logprob, top, allowed))
            if sampler.needs_tokens:
                sampler.accept(int(id))
        return tokens


def sample_tokens(logits: Tensor, samplers: Sequence[TokenSampler]) -> SampledBatch:
    """Sample a token from each row of [request, vocabulary]. May overwrite the logits."""
    device, plain = logits.device, all(sampler.plain for sampler in samplers)
    uniform = to_device(np.array([sampler.uniform() for sampler in samplers]), device)
    if not plain:
        for index, sampler in enumerate(samplers):
            if sampler.penalises:
                logits[index] = sampler.penalise(logits[index])
    if any(sampler.temperature != 1 for sampler in samplers):
        highest = logits.amax(-1, keepdim=True)  # subtracted first, so that nothing overflows
        logits = (logits - highest) / _column([sampler.temperature for sampler in samplers], logits)
    allowed = None if plain else torch.ones(len(samplers), dtype=torch.float64, device=device)
    if allowed is not None and (
        matchers := {i: one.matcher for i, one in enumerate(samplers) if one.matcher is not None}
    ):
        rows = to_device(np.array(list(matchers)), device)
        logits[rows], allowed[rows] = constrain(logits[rows], list(matchers.values()))
    if not plain and (truncated := [index for index, sampler in enumerate(samplers) if sampler.truncates]):
        rows = to_device(np.array(truncated), device)
        logits[rows] = truncate(logits[rows], [samplers[index].sampling for index in truncated])
    logprobs = torch.log_softmax(logits, -1)
    ids = _select(logprobs.exp(), uniform)
    if not plain and any(sampler.greedy for sampler in samplers):
        greedy = to_device(np.array([sampler.greedy for sampler in samplers]), device)
        ids = torch.where(greedy, logprobs.argmax(-1), ids)
    most = max(sampler.top_logprobs for sampler in samplers)
    parts = [ids[:, None], logprobs.gather(-1, ids[:, None])]
    if allowed is not None:
        values, likeliest = logprobs.topk(most)
        parts += [allowed[:, None], likeliest, values]
    return SampledBatch(ids, torch.cat([part.double() for part in parts], 1), samplers, most)


def prompt_logprobs(logits: Tensor, ids: Sequence[int], top: int) -> list[tuple[float, TopLogprobs]]:
    """Return, for each row of [token, vocabulary], the logprob of the token that follows and the likeliest ones.

    They are those at temperature 1. It waits for the device.
    """
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs.gather(-1, to_device(np.array(ids), logits.device)[:, None])[:, 0].tolist()
    values, likeliest = logprobs.topk(top)
    tops = zip(likeliest.tolist(), values.tolist(), strict=True)
    return [(one, tuple(zip(*pairs, strict=True))) for one, pairs in zip(chosen, tops, strict=True)]


def _select(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row of [request, vocabulary] the id at which the cumulative distribution passes `uniform`.

    It is the last id if probabilities are not finite, which the logprob of the token then shows.
    """
    rows, vocabulary = probabilities.shape
    if vocabulary < 2 * CUMULATIVE_BLOCK:
        cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        ids = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
        return ids[:, 0].clamp_(max=vocabulary - 1)
    size = math.gcd(vocabulary, CUMULATIVE_BLOCK)
    if size < CUMULATIVE_BLOCK // 16:
        size = CUMULATIVE_BLOCK
        probabilities = torch.nn.functional.pad(probabilities, (0, -vocabulary % size))
    blocks = probabilities.view(rows, -1, size)
    masses = blocks.sum(-1, dtype=torch.float64)
    cumulative = masses.cumsum(-1)
    point = uniform[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, point, right=True).clamp_(max=masses.shape[1] - 1)
    inside = point - cumulative.gather(-1, block) + masses.gather(-1, block)
    cumulative = blocks.gather(1, block[:, :, None].expand(-1, 1, size))[:, 0].cumsum(-1, dtype=torch.float64)
    inside = torch.minimum(inside, cumulative[:, -1:] * (1 - 2**-40))  # rounding must not pass the end of the block
    ids = block * size + torch.searchsorted(cumulative, inside, right=True)
    return ids[:, 0].clamp_(max=vocabulary - 1)


def constrain(logits: Tensor, matchers: Sequence[GrammarMatcher]) -> tuple[Tensor, Tensor]:
    """Set the logits of [request, vocabulary] that grammars forbid to minus infinity.

    Also returns the probability of the allowed tokens for each request: 0 if a single one is allowed, since the
    model does not choose it.
    """
    bits = np.stack([np.frombuffer(matcher.allowed_bitmask(), np.uint8) for matcher in matchers])
    allowed = to_device(np.unpackbits(bits, axis=1, count=logits.shape[-1], bitorder="little"), logits.device).bool()
    masses = logits.softmax(-1).masked_fill(~allowed, 0).sum(-1, dtype=torch.float64).clamp(max=1)
    masses.masked_fill_(allowed.count_nonzero(-1) <= 1, 0)
    return logits.masked_fill(~allowed, -torch.inf), masses.round(decimals=6)


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


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return to_device(np.array(values), like.device).to(like.dtype)[:, None]
