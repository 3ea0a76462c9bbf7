"""Statistics of an update: ratios, clip shares, entropy, KL divergence from the sampler, effective sample size.

Sums and extremes are collected for each micro-batch and divided once at the end, so metrics do not depend on how an
update was divided into micro-batches of whole calls.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import inf

import torch
from torch import Tensor

from leyden.rl.divergence import k1, k3, ratio, total
from leyden.rl.loss import TokenBatch
from leyden.rl.situation import MAX_TURN


class Statistics:
    """Collects sums over the tokens of an update."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._metrics: defaultdict[str, float] = defaultdict(float)
        """Sums of the metrics of the loss, kept apart because a user's loss chooses their names."""
        self._turns = torch.zeros(MAX_TURN + 1, 3, dtype=torch.float64)
        """For each turn: tokens, and the sums of k1 and k3 to the sampler."""
        self._highest, self._lowest = -inf, inf

    @torch.no_grad()
    def add(
        self, tokens: TokenBatch, sampler_logprobs: Tensor, turn: Tensor, metrics: Mapping[str, Tensor], entropy: Tensor
    ) -> None:
        """Add a micro-batch: `turn` is the index of each token's call in its rollout; the others are per token."""
        if not len(sampler_logprobs):
            return
        current, proximal, sampler = (t.double() for t in (tokens.current, tokens.proximal, sampler_logprobs))
        step_ratio = metrics.get("ratio", ratio(current - proximal)).double()
        weight, call_weight = ratio(proximal - sampler), ratio(total(proximal - sampler, tokens.call))
        sums = {
            "calls": torch.ones_like(call_weight).sum(),
            "ratio_mean": step_ratio.sum(),
            "entropy": entropy.double().sum(),
            "kl_proximal_k3": k3(proximal, current).sum(),
            "weight": weight.sum(),
            "weight^2": (weight**2).sum(),
            "call_weight": call_weight.sum(),
            "call_weight^2": (call_weight**2).sum(),
        }
        of_loss = {name: metric.double().sum() for name, metric in metrics.items() if name != "ratio"}
        extremes = (step_ratio.max(), step_ratio.min())
        # one transfer from the device for all numbers
        *found, highest, lowest = torch.stack([*sums.values(), *of_loss.values(), *extremes]).tolist()
        for name, value in zip(sums, found[: len(sums)], strict=True):
            self._sums[name] += value
        for name, value in zip(of_loss, found[len(sums) :], strict=True):
            self._metrics[name] += value
        self._highest, self._lowest = max(self._highest, highest), min(self._lowest, lowest)
        of_token = torch.stack([torch.ones_like(sampler), k1(sampler, proximal), k3(sampler, proximal)], dim=1)
        turns = of_token.new_zeros(MAX_TURN + 1, 3).index_add(0, turn.clamp(max=MAX_TURN), of_token)
        self._turns += turns.cpu()

    @classmethod
    def joined(cls, parts: Iterable["Statistics"]) -> "Statistics":
        """Join the statistics of the parts of an update."""
        whole = cls()
        for part in parts:
            for name, value in part._sums.items():
                whole._sums[name] += value
            for name, value in part._metrics.items():
                whole._metrics[name] += value
            whole._turns += part._turns
            whole._highest, whole._lowest = max(whole._highest, part._highest), min(whole._lowest, part._lowest)
        return whole

    def finish(self) -> dict[str, float]:
        """Return means over tokens, extremes and shares; empty if no token was added.

        Metrics of the loss come with them, except those that have the name of another metric.
        `kl_sampler` is KL(sampler || proximal), also of each turn; `kl_proximal` is KL(proximal || current); `ess` is
        the effective sample size, as a share of the tokens or calls.
        """
        sums = dict(self._sums)
        tokens, by_k1, by_k3 = self._turns.sum(0).tolist()
        if not tokens:
            return {}
        found = {
            **{name: value / tokens for name, value in self._metrics.items()},
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
