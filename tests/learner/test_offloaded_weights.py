"""An optimiser in host memory makes the same updates, and the device has only weights and gradients."""

from pathlib import Path

import pytest
import torch
from smallpolicy import OBJECTIVE, small_policy, some_samples

from leyden.config import CheckpointConfig
from leyden.learner import offloaded_weights
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs, TrainerState
from leyden.models.source import ModelSource
from leyden.records import DEFAULT_POLICY


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several buckets, of which some have several parameters."""
    monkeypatch.setattr(offloaded_weights, "_BUCKET", 2000)


def train(policy: Policy, steps: range = range(3)) -> list[float]:
    norms = []
    for step in steps:
        metrics = policy.accumulate(some_samples(seed=step), OldLogprobs(), OBJECTIVE)
        policy.apply(metrics.grad_norm)
        norms.append(metrics.grad_norm)
    return norms


def same(one: Policy, other: Policy, tolerance: float) -> None:
    for name, tensor in one.parameters.items():
        torch.testing.assert_close(tensor, other.parameters[name], rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(one.served.parameters(), other.served.parameters(), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-6)])
@pytest.mark.parametrize("clip_norm", [0.01, 1e9])
def test_updates_are_those_of_an_optimiser_on_the_device(
    dtype: torch.dtype, tolerance: float, clip_norm: float
) -> None:
    options = {"critic": True, "dtype": dtype, "clip_norm": clip_norm, "layout": "rows", "batch_tokens": 64}
    plain, offloaded = small_policy(**options), small_policy(**options, offload="optimiser")
    assert train(offloaded) == pytest.approx(train(plain), rel=1e-5)
    same(offloaded, plain, tolerance)
    for name, master in offloaded.trained.items():
        computed = offloaded.model.get_parameter(name)
        assert master is not computed and torch.equal(master.to(dtype), computed) and computed.grad is None
    assert not offloaded.masters.gradients


@pytest.mark.parametrize("before", ["none", "optimiser"])
def test_a_run_goes_on_with_and_without(before: str, tmp_path: Path) -> None:
    options = {"dtype": torch.float64, "critic": True}
    after = {"none": "optimiser", "optimiser": "none"}[before]
    first, second = small_policy(**options, offload=before), small_policy(seed=1, **options, offload=after)
    train(first)
    first.served.save_pretrained(tmp_path / "model")
    kept = Checkpoints(tmp_path, DEFAULT_POLICY, ModelSource("small", tmp_path / "model"), CheckpointConfig())
    kept.write(kept.snapshot(first, TrainerState(step=3, version=3)))
    assert kept.restore_latest(second).step == 3
    same(second, first, 0.0)
    train(first, range(3, 5)), train(second, range(3, 5))
    same(second, first, 1e-12)
    kept.load(second, 3)
    kept.load(first, 3)
    same(second, first, 0.0)
