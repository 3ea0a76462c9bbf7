"""What an update looked like: ratios, clip shares, entropy, distance to the sampler, effective sample size.

Sums and extremes are collected batch by batch and divided once in the end, so figures do not depend on how an update
was divided into batches of whole calls.
"""

from collections import defaultdict
from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from leyden.rl.kl import k1, k3
from leyden.rl.loss import TokenBatch
from leyden.rl.ratio import ratio, total

DEEPEST = 15
"""Turns from this one on are reported as one."""


class Statistics:
    """Sums over the tokens of an update."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._turns = torch.zeros(DEEPEST + 1, 3, dtype=torch.float64)
        """Tokens, and the sums of k1 and k3 to the sampler, of each turn."""
        self._highest, self._lowest = -inf, inf

    @torch.no_grad()
    def add(
        self, tokens: TokenBatch, sampler: Tensor, depth: Tensor, figures: Mapping[str, Tensor], entropy: Tensor
    ) -> None:
        """Count a batch: `depth` is the turn of each token's call, `figures` and `entropy` are of tokens."""
        if not len(sampler):
            return
        current, proximal, drawn = tokens.current.double(), tokens.proximal.double(), sampler.double()
        moved = figures.get("ratio", ratio(current - proximal)).double()
        weight, call_weight = ratio(proximal - drawn), ratio(total(proximal - drawn, tokens.call))
        sums = {
            "calls": torch.ones_like(call_weight).sum(),
            "ratio_mean": moved.sum(),
            "entropy": entropy.double().sum(),
            "kl_proximal_k3": k3(proximal, current).sum(),
            "weight": weight.sum(),
            "weight^2": (weight**2).sum(),
            "call_weight": call_weight.sum(),
            "call_weight^2": (call_weight**2).sum(),
            **{name: figure.double().sum() for name, figure in figures.items() if name != "ratio"},
        }
        *found, highest, lowest = torch.stack([*sums.values(), moved.max(), moved.min()]).tolist()
        for name, value in zip(sums, found, strict=True):
            self._sums[name] += value
        self._highest, self._lowest = max(self._highest, highest), min(self._lowest, lowest)
        of_token = torch.stack([torch.ones_like(drawn), k1(drawn, proximal), k3(drawn, proximal)], dim=1)
        turns = of_token.new_zeros(DEEPEST + 1, 3).index_add(0, depth.clamp(max=DEEPEST), of_token)
        self._turns += turns.cpu()

    def finish(self) -> dict[str, float]:
        """Means over tokens, extremes, and shares; nothing where no token was counted.

        `kl_sampler` is KL(sampler || proximal), also of each turn; `kl_proximal` is KL(proximal || current); `ess` is
        the share of tokens or calls that would say as much if the proximal policy had drawn them.
        """
        sums = dict(self._sums)
        tokens, by_k1, by_k3 = self._turns.sum(0).tolist()
        if not tokens:
            return {}
        found = {
            "ratio_max": self._highest,
            "ratio_min": self._lowest,
            "ess_token": sums.pop("weight") ** 2 / (tokens * sums.pop("weight^2")),
            "ess_call": sums.pop("call_weight") ** 2 / (sums.pop("calls") * sums.pop("call_weight^2")),
            "kl_sampler_k1": by_k1 / tokens,
            "kl_sampler_k3": by_k3 / tokens,
            **{name: value / tokens for name, value in sums.items()},
        }
        for turn, (of_turn, by_k1, by_k3) in enumerate(self._turns.tolist()):
            if of_turn:
                found[f"kl_sampler_k1_turn_{turn}"] = by_k1 / of_turn
                found[f"kl_sampler_k3_turn_{turn}"] = by_k3 / of_turn
        return found
