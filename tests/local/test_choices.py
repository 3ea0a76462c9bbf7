"""What `[algorithm]` and `[training]` offer, trained with as a user would: every choice moves weights, and reports."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tables import steps, train_table

from leyden.config import ConfigError
from leyden.models.source import BUNDLED

TINY = (
    "reward=lots.py:reward",
    "held_out=0",
    "training.steps=2",
    "training.tasks_per_step=2",
    "training.updates_per_step=2",
    "training.group_size=3",
    "workers.processes=1",
)
ALWAYS = {
    *("loss", "grad_norm", "learning_rate", "entropy", "ratio_mean", "ratio_max", "ratio_min"),
    *("ess_token", "ess_call", "kl_proximal_k3", "kl_sampler_k1", "kl_sampler_k3"),
    *("kl_sampler_k1_turn_0", "kl_sampler_k3_turn_0", "kl_sampler_k1_turn_1", "kl_sampler_k3_turn_1"),
}
CHOICES = {
    "grpo": (
        ("algorithm.credit=stepwise", "algorithm.loss=gspo", "algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"),
        ("algorithm.aggregation=call_mean", "algorithm.kl=0.1", "algorithm.kl_estimate=k2", "algorithm.entropy=0.01"),
        ("algorithm.correction=masked", "algorithm.correction_level=call", "training.lora={rank=4, alpha=8}"),
        ("algorithm.correction_ratio=geometric", "algorithm.compare=role", "algorithm.scale_steps=true"),
        ("signals.tool_succeeded=0.1", "signals.tool_failed=-0.1"),
    ),
    "rloo": (
        ("algorithm.loss=reinforce", "algorithm.aggregation=constant", "algorithm.length=64"),
        ("algorithm.correction_level=rollout", "training.gradient_checkpointing=true"),
    ),
    "reinforce_pp": (
        ("algorithm.credit=discounted", "algorithm.loss=cispo", "algorithm.aggregation=token_mean"),
        ("algorithm.kl=0.01", "algorithm.kl_in=reward", "algorithm.correction=none"),
        ("training.tasks_per_step=6", "training.group_size=1", "training.min_group=1"),
    ),
    "gigpo": (("algorithm.credit=discounted", "algorithm.gamma=0.95", "algorithm.clip_dual=3.0"),),
    "ppo": (
        ("algorithm.credit=gae", "training.layout=rows", "training.weight_decay=0.01"),
        ("training.epochs=2", "algorithm.value_clip=0.2"),
    ),
}
REPORTED = {
    "grpo": {"training/clipped_low", "training/clipped_high", "training/kl_reference", "reward/automatic"},
    "rloo": set(),
    "reinforce_pp": {"training/clipped_high"},
    "gigpo": {"calls/states_shared", "training/clipped_dual"},
    "ppo": {"training/critic_loss"},
}


@pytest.mark.parametrize(
    "advantage",
    # what is slow is computed in tests/rl and tests/learner too
    [pytest.param(one, marks=[] if one in ("grpo", "ppo") else [pytest.mark.slow]) for one in CHOICES],
)
def test_every_choice_moves_weights_and_reports(advantage: str, tmp_path: Path) -> None:
    settings = [setting for some in CHOICES[advantage] for setting in some]
    trained = train_table(tmp_path, *TINY, "training.steps=1", f"algorithm.advantage={advantage}", *settings)
    (row,) = steps(trained)
    expected = {f"training/{name}" for name in ALWAYS} | REPORTED[advantage]
    assert row["rollouts/trained"] == row["rollouts/requested"] == 6
    assert row["training/grad_norm"] > 0
    assert expected <= row.keys(), expected - row.keys()
    assert abs(row["training/kl_sampler_k1"]) < 1e-4  # the sampler is the policy
    before, after = (load_file(folder / "model.safetensors") for folder in (BUNDLED["spark"], trained.checkpoint))
    assert any(not torch.equal(before[name].float(), after[name]) for name in before)


@pytest.mark.slow
def test_a_critic_and_adapters_resume_as_if_never_stopped(tmp_path: Path) -> None:
    beside = ("algorithm.advantage=ppo", "algorithm.credit=gae", "training.lora={rank=4, alpha=8}", "algorithm.kl=0.1")
    one_group = ("training.tasks_per_step=1", "training.updates_per_step=1")  # whose rollouts come in one order only
    settings = (*TINY, *one_group, *beside, "deterministic=true")
    through = train_table(tmp_path / "through", *settings)
    train_table(tmp_path / "stopped", *settings, "training.steps=1")
    stopped = train_table(tmp_path / "stopped", *settings)
    assert [row["step"] for row in steps(stopped)] == [1, 2]
    assert through.checkpoint is not None and stopped.checkpoint is not None
    for file in ("model.safetensors", "beside.safetensors"):
        one, other = load_file(through.checkpoint / file), load_file(stopped.checkpoint / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("training.group_size=1", "training.min_group=1"), "`training.group_size` is 1, and `algorithm.advantage = "),
        (('training.lora={modules=["c_attn"]}',), "its linear layers are down_proj, gate_proj"),
        (("algorithm.advantage=ppo",), 'write `algorithm.credit = "gae"`'),
        (("algorithm.aggregation=constant",), "set `algorithm.length`"),
    ],
)
def test_what_could_teach_nothing_is_refused(settings: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        train_table(tmp_path, *TINY, *settings)
