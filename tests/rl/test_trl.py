"""Our losses, aggregations and KL against what TRL's own code said of the same tensors (see record_trl.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from leyden.config import Hyperparameters
from leyden.rl.aggregation import Aggregation
from leyden.rl.aggregation.constant import constant
from leyden.rl.aggregation.rollout_mean import rollout_mean
from leyden.rl.aggregation.token_mean import token_mean
from leyden.rl.divergence import k3
from leyden.rl.loss import Loss, TokenBatch
from leyden.rl.loss.cispo import cispo
from leyden.rl.loss.gspo import gspo
from leyden.rl.loss.ppo_clip import ppo_clip

RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("trl.json").read_text())
OURS: dict[str, tuple[Loss, Aggregation]] = {
    "grpo": (ppo_clip, rollout_mean),
    "bnpo": (ppo_clip, token_mean),
    "dapo": (ppo_clip, token_mean),
    "dr_grpo": (ppo_clip, constant),
    "cispo": (cispo, token_mean),
    "gspo": (gspo, rollout_mean),
    "dual clip": (ppo_clip, token_mean),
    "grpo with KL": (ppo_clip, rollout_mean),
    "gspo with KL": (gspo, rollout_mean),
    "cispo with KL": (cispo, token_mean),
}


def test_everything_recorded_is_compared() -> None:
    assert set(RECORD["cases"]) == set(OURS)


@pytest.mark.parametrize("name", OURS)
def test_loss_gradient_and_metrics_are_those_of_trl(name: str) -> None:
    loss, aggregation = OURS[name]
    settings, told = RECORD["cases"][name]["settings"], RECORD["cases"][name]
    given = {key: torch.tensor(samples, dtype=torch.float64) for key, samples in RECORD["tensors"].items()}
    mask = given["mask"].bool()
    high = settings["epsilon_high"] - (loss is cispo)  # for cispo, TRL's is the bound itself
    hyperparameters = Hyperparameters(
        clip_low=settings["epsilon"],
        clip_high=high,
        clip_dual=settings.get("delta"),
        length=settings["max_completion_length"],
        deviation_floor=0.0,
    )
    lengths = mask.sum(1)
    current = given["current"].clone().requires_grad_()
    tokens = TokenBatch(
        current=current[mask],
        proximal=given["proximal"][mask],
        advantages=given["advantages"].repeat_interleave(lengths),
        call=torch.arange(len(mask)).repeat_interleave(lengths),
    )
    losses, metrics = loss(tokens, hyperparameters)
    kl_penalty = k3(tokens.current, given["reference"][mask])
    shares = aggregation([[length] for length in lengths.tolist()], hyperparameters)
    weights = torch.tensor([share for (share,) in shares], dtype=torch.float64).repeat_interleave(lengths)
    whole = (weights * (losses + settings["beta"] * kl_penalty)).sum()
    (gradient,) = torch.autograd.grad(whole, current)

    assert whole.item() == pytest.approx(told["loss"], abs=1e-12)
    assert gradient.numpy() == pytest.approx(torch.tensor(told["gradient"], dtype=torch.float64).numpy(), abs=1e-12)
    if settings["beta"]:
        assert kl_penalty.mean().item() == pytest.approx(told["figures"]["kl"], abs=1e-6)
    if loss is ppo_clip:
        for ours, theirs in ("clipped_low", "clip_ratio/low_mean"), ("clipped_high", "clip_ratio/high_mean"):
            assert metrics[ours].double().mean().item() == pytest.approx(told["figures"][theirs], abs=1e-6)
