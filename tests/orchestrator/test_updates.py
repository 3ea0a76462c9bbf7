"""What a step knows before its first update: what moves, what is taken from rewards, and which samples are left."""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from smallepisodes import call, episode
from smallpolicy import prepare_updates, small_policy
from torch import Tensor

from leyden.config import AdapterConfig, AlgorithmConfig, Config, ConfigError, Hyperparameters, read_config
from leyden.learner.objective import objective_of
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.orchestrator.credit.samples import SampleFilter, SelectedRollout, StepAccounting, select_rollouts
from leyden.outcomes import Ending
from leyden.records import CallCredit
from leyden.rl.registry import KINDS, declaration, names, unused_settings


def algorithm(**named: Any) -> Config:
    return read_config({"run": "r", "agent": "a", "tasks": "t", "algorithm": named})


def groups() -> list[list[SelectedRollout]]:
    """Two groups: one whose rollouts differ, and one whose rollouts are worth the same."""
    sample_filter = SampleFilter(min_group=1, failure_reward=0.0, roles=None)
    pairs = [
        [episode(0, 1.0, [call("a", 4), call("b", 3)]), episode(1, 0.0, [call("c", 2)])],
        [episode(2, 1.0, [call("d", 2)]), episode(3, 1.0, [call("e", 2)])],
    ]
    return [select_rollouts(pair, sample_filter, StepAccounting()) or [] for pair in pairs]


def test_calls_without_an_advantage_are_left_out_unless_something_else_moves_them() -> None:
    (update,) = prepare_updates(groups(), 1, small_policy(), algorithm(), StepAccounting())
    assert [sample.call for sample in update.samples] == ["a", "b", "c"]
    for named in ({"entropy": 0.1}, {"kl": 0.1}, {"credit": "gae", "advantage": "ppo"}):
        policy = small_policy(critic="credit" in named, reference="kl" in named)
        (update,) = prepare_updates(groups(), 1, policy, algorithm(**named), StepAccounting())
        assert [sample.call for sample in update.samples] == ["a", "b", "c", "d", "e"]
        assert (update.old_logprobs.reference is not None) == ("kl" in named)


def test_what_a_step_makes_of_every_call_is_recorded() -> None:
    accounting = StepAccounting()
    rules = SampleFilter(min_group=2, failure_reward=0.0, roles=("writer",))
    writer = {"role": "writer"}
    kept = [
        episode(0, 1.0, [call("a", 4, **writer), call("b", 3), call("x", policy="upstream")]),
        episode(1, 0.0, [call("c", 2, **writer)]),
        episode(2, None, [call("lost", **writer)], Ending.LOST),
    ]
    flat = [episode(3, 1.0, [call("d", **writer)]), episode(4, 1.0, [call("e", **writer)])]
    small = [episode(5, 1.0, [call("f", **writer), call("g")])]
    selected = [select_rollouts(group, rules, accounting) for group in (kept, flat, small)]
    assert selected[2] is None
    prepare_updates([one for one in selected if one is not None], 1, small_policy(), algorithm(), accounting)
    found = {credit.call: credit for credit in accounting.credits}
    assert len(found) == len(accounting.credits)
    assert {name: credit.excluded for name, credit in found.items()} == {
        "a": "",
        "b": "role not selected",
        "c": "",
        "lost": "rollout ended as lost",
        "d": "its advantage is 0",
        "e": "its advantage is 0",
        "f": "group too small",
        "g": "role not selected",
    }
    assert found["a"] == CallCredit("g.0.1", "a", 1.0, pytest.approx(0.5**0.5), pytest.approx(1 / 16), 4)
    assert found["c"] == CallCredit("g.1.1", "c", 0.0, pytest.approx(-(0.5**0.5)), pytest.approx(1 / 8), 2)
    assert (found["d"].value, found["d"].advantage, found["d"].tokens) == (1.0, 0.0, 0)
    assert found["lost"].value is None


def test_a_call_to_which_the_credit_gives_nothing_is_recorded_as_such() -> None:
    accounting = StepAccounting()
    prepare_updates(groups()[:1], 1, small_policy(), algorithm(credit="last_call"), accounting)
    expected = [("a", "no credit"), ("b", ""), ("c", "")]
    assert [(credit.call, credit.excluded) for credit in accounting.credits] == expected


def test_the_proximal_policy_is_that_before_the_first_update() -> None:
    policy = small_policy()
    (alone,) = prepare_updates(groups(), 1, policy, algorithm(), StepAccounting())
    assert alone.old_logprobs.proximal is None  # nothing moves before it
    first, second = prepare_updates(groups(), 2, policy, algorithm(entropy=0.1), StepAccounting())
    expected = policy.logprobs(second.samples)
    assert first.old_logprobs.proximal is not None and second.old_logprobs.proximal is not None
    for found, logprobs in zip(second.old_logprobs.proximal, expected, strict=True):
        np.testing.assert_allclose(found, logprobs)


def test_each_epoch_repeats_the_updates_of_a_step_against_the_policy_before_the_first() -> None:
    policy, accounting = small_policy(), StepAccounting()
    updates = prepare_updates(groups(), 2, policy, algorithm(entropy=0.1), accounting, epochs=3)
    assert [[sample.call for sample in update.samples] for update in updates] == [["a", "b", "c"], ["d", "e"]] * 3
    assert accounting.calls_trained == len(accounting.credits) == 5  # counted once
    (once, again) = prepare_updates(groups()[:1], 1, policy, algorithm(), StepAccounting(), epochs=2)
    before = policy.logprobs(once.samples)
    assert once.old_logprobs.proximal is not None and again.old_logprobs.proximal is not None
    policy.apply(policy.accumulate(once.samples, once.old_logprobs, objective_of(algorithm())).grad_norm)
    for found, logprobs in zip(again.old_logprobs.proximal, before, strict=True):
        np.testing.assert_allclose(found, logprobs)
    moved = policy.accumulate(again.samples, again.old_logprobs, objective_of(algorithm()))
    assert moved.statistics["ratio_max"] > 1.0001  # the second epoch is away from it


def test_the_critic_is_held_to_the_values_before_the_first_update() -> None:
    policy = small_policy(critic=True)
    asked = algorithm(credit="gae", advantage="ppo", value_clip=0.1)
    (update,) = prepare_updates(groups(), 1, policy, asked, StepAccounting())
    assert [sample.old_value for sample in update.samples] == pytest.approx(policy.evaluate(update.samples).values)
    first = policy.accumulate(update.samples, update.old_logprobs, objective_of(asked))
    free = policy.accumulate(update.samples, update.old_logprobs, replace(objective_of(asked), value_clip=None))
    assert first.critic_loss == pytest.approx(free.critic_loss)  # nothing has moved yet
    far = [replace(sample, old_value=sample.old_value + 5.0) for sample in update.samples]
    held = policy.accumulate(far, update.old_logprobs, objective_of(asked))
    assert held.critic_loss is not None and first.critic_loss is not None
    assert held.critic_loss > first.critic_loss


@pytest.mark.parametrize(
    "settings",
    [{"credit": "gae", "advantage": "ppo"}, {"correction": "masked", "correction_level": "rollout", "entropy": 0.1}],
    ids=["critic", "rollout"],
)
def test_values_and_logprobs_of_the_same_samples_are_computed_together(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, evaluated = small_policy(critic=settings.get("advantage") == "ppo"), list[int]()
    evaluate = policy._evaluate
    monkeypatch.setattr(policy, "_evaluate", lambda *args: evaluated.append(len(args[0])) or evaluate(*args))
    (update, _) = prepare_updates(groups(), 1, policy, algorithm(**settings), StepAccounting(), epochs=2)
    assert evaluated == [len(update.samples)]
    assert update.old_logprobs.proximal is not None
    for found, logprobs in zip(update.old_logprobs.proximal, policy.logprobs(update.samples), strict=True):
        np.testing.assert_allclose(found, logprobs)


@pytest.mark.parametrize(
    ("number", "sizes"), [(1, [7]), (3, [2, 2, 3]), (5, [1, 1, 2, 1, 2]), (7, [1] * 7), (9, [1] * 7)]
)
def test_groups_are_divided_evenly_into_the_configured_updates(number: int, sizes: list[int]) -> None:
    many = [group for _ in range(7) for group in groups()[:1]]
    updates = prepare_updates(many, number, small_policy(), algorithm(), StepAccounting())
    assert [len(update.samples) // 3 for update in updates] == sizes  # a group has three calls


def test_a_correction_of_a_whole_rollout_counts_all_of_its_calls() -> None:
    policy = small_policy()
    asked = algorithm(correction="masked", correction_level="rollout", credit="last_call")
    (update,) = prepare_updates(groups(), 1, policy, asked, StepAccounting())
    assert [sample.call for sample in update.samples] == ["b", "c"]  # of which `a` is a part all the same
    laid = {
        sample.call: lp
        for update in prepare_updates(groups(), 1, policy, algorithm(), StepAccounting())
        for sample, lp in zip(update.samples, policy.logprobs(update.samples), strict=True)
    }
    gap = (laid["a"] + 1).sum() + (laid["b"] + 1).sum()  # each token was drawn with a logprob of -1
    assert update.old_logprobs.ratios is not None
    assert update.old_logprobs.ratios[0] == pytest.approx(gap.clamp(-20, 20).exp().item(), rel=1e-5)
    mean = algorithm(correction="masked", correction_level="rollout", correction_ratio="geometric", credit="last_call")
    (update,) = prepare_updates(groups(), 1, policy, mean, StepAccounting())
    assert update.old_logprobs.ratios is not None
    assert update.old_logprobs.ratios[0] == pytest.approx((gap / 7).exp().item(), rel=1e-5)  # over 4 and 3 tokens


@pytest.mark.parametrize(
    ("named", "distance"),
    [
        ({}, lambda d: d),
        ({"kl_estimate": "k2"}, lambda d: d**2 / 2),
        ({"kl_estimate": "k3"}, lambda d: (-d).expm1() + d),
    ],
)
def test_distance_to_the_reference_is_taken_from_the_reward(
    named: dict[str, str], distance: Callable[[Tensor], Tensor]
) -> None:
    policy, accounting = small_policy(reference=True), StepAccounting()
    asked = algorithm(kl=0.5, kl_in="reward", advantage="dr_grpo", credit="stepwise", spread="last", **named)
    (update,) = prepare_updates(groups()[:1], 1, policy, asked, accounting)
    targets = {sample.call: sample.target for sample in update.samples}
    of_token = [distance(-1 - logprobs) for logprobs in policy.reference_logprobs(update.samples)]  # all drawn with -1
    a, b, c = (0.5 * each.sum().item() for each in of_token)
    assert targets == pytest.approx({"a": -a, "b": 1 - b, "c": -c}, rel=1e-4)
    assert update.old_logprobs.reference is None
    assert accounting.kl_reference == pytest.approx(torch.cat(of_token).sum().item(), rel=1e-4)
    assert accounting.kl_tokens == 9


def test_lora_is_held_against_the_weights_beside_it() -> None:
    policy = small_policy(reference=True, lora=AdapterConfig(rank=2))
    (update,) = prepare_updates(groups(), 1, policy, algorithm(kl=0.1), StepAccounting())
    frozen = policy.reference_logprobs(update.samples)
    for parameter in policy.trained.values():
        torch.nn.init.normal_(parameter)
    policy.adapter.publish()
    moved = policy.logprobs(update.samples)
    assert not torch.allclose(moved[0], frozen[0])
    torch.testing.assert_close(policy.reference_logprobs(update.samples)[0], frozen[0])
    served = small_policy()
    served.model.load_state_dict(policy.served.state_dict())
    torch.testing.assert_close(served.logprobs(update.samples)[0], moved[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"credit": "gae"}, '`algorithm.credit = "identical"`'),
        ({"advantage": "ppo"}, '`algorithm.credit = "gae"`'),
        ({"aggregation": "constant"}, "algorithm.length"),
        ({"loss": "nonsense"}, "ppo_clip"),
        ({"advantage": "gigpo", "credit": "discounted", "state": "nonsense"}, "messages, prompt"),
        ({"correction": "nonsense"}, "masked, truncated, none"),
        ({"loss": "nowhere:at_all"}, "`algorithm.loss`: 'nowhere:at_all': there is no module 'nowhere'"),
        ({"credit": "nowhere.py:at_all"}, "`algorithm.credit`: 'nowhere.py:at_all': there is no file"),
    ],
)
def test_an_algorithm_that_makes_no_sense_is_refused_before_any_work(named: dict[str, str], said: str) -> None:
    config = algorithm(**named)
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        (algorithm_of(config), objective_of(config))


OWN = """
def value(earned, hyperparameters): return [1.0] * len(earned.steps)
def above(calls, hyperparameters): return calls.value
def loss(tokens, hyperparameters): return -tokens.current, {}
def even(lengths, hyperparameters): return [[1.0] * len(calls) for calls in lengths]
def plain(ratio, hyperparameters): return ratio
def place(episode, call): return call.id
def worth(signal): return 0.5
"""


@pytest.mark.parametrize("place", ["my_functions", "my_functions.py"])
def test_user_functions_are_loaded_like_agents(place: str, tmp_path: Path) -> None:
    (tmp_path / "my_functions.py").write_text(OWN)
    rooms = {"credit": "value", "advantage": "above", "loss": "loss", "aggregation": "even", "correction": "plain"}
    named = {key: f"{place}:{name}" for key, name in {**rooms, "state": "place"}.items()}
    rule = {"rule": f"{place}:worth"}
    document = {"run": "r", "agent": "a", "tasks": "t", "base": str(tmp_path), "algorithm": named, "signals": rule}
    config = read_config(document)
    found, objective = algorithm_of(config), objective_of(config)
    (update,) = prepare_updates(groups(), 1, small_policy(), config, StepAccounting())
    assert [(sample.advantage, sample.weight) for sample in update.samples] == [(1.0, 1.0)] * 5
    assert objective.loss.__name__ == "loss"
    assert objective.correction is not None and objective.correction.__name__ == "plain"
    assert found.signals.rule is not None and found.signals.rule(None) == 0.5


def test_settings_that_no_algorithm_reads_are_reported() -> None:
    said = unused_settings(AlgorithmConfig(gamma=0.5, state="prompt", normalize_by="source", kl_estimate="k2"))
    assert [line.split("`")[1] for line in said] == [
        f"algorithm.{key}" for key in ("gamma", "state", "normalize_by", "kl_in")
    ]
    assert said[0] == '`algorithm.gamma` does nothing with `credit = "identical"`'
    assert (
        unused_settings(AlgorithmConfig(credit="discounted", gamma=0.5, advantage="own.py:mine", state="prompt")) == []
    )
    assert unused_settings(AlgorithmConfig(kl=0.1, kl_in="reward", kl_estimate="k2")) == []
    (clip,) = unused_settings(AlgorithmConfig(value_clip=0.2))
    assert clip.startswith("`algorithm.value_clip` does nothing without a critic")
    (mean,) = unused_settings(AlgorithmConfig(correction_ratio="geometric"))
    assert mean.startswith("`algorithm.correction_ratio` does nothing unless")
    assert unused_settings(AlgorithmConfig(loss="gspo", correction="none")) == []  # its defaults were not set


def test_each_algorithm_declares_the_hyperparameters_that_its_file_reads() -> None:
    for kind in KINDS:
        for name in names(kind):
            source = inspect.getsource(import_module(f"leyden.rl.{kind}.{name}"))
            read = set(re.findall(r"hyperparameters\.(\w+)", source))
            if name == "gspo":  # which clips as ppo_clip does
                read |= {"clip_low", "clip_high", "clip_dual"}
            declared = declaration(kind, name)
            assert declared is not None
            assert read == set(declared.reads) & set(Hyperparameters.__struct_fields__), name


def test_default_hyperparameters_are_those_of_a_configuration() -> None:
    named = objective_of(algorithm()).hyperparameters
    assert all(getattr(named, key) == getattr(Hyperparameters(), key) for key in Hyperparameters.__struct_fields__)


@pytest.mark.parametrize(
    ("named", "level", "is_geometric"),
    [
        ({}, "token", False),
        ({"loss": "gspo"}, "call", True),
        ({"loss": "gspo", "correction_level": "token"}, "token", True),
    ],
)
def test_a_loss_of_whole_calls_is_corrected_by_calls(named: dict[str, str], level: str, is_geometric: bool) -> None:
    objective = objective_of(algorithm(**named))
    assert objective.correction is not None  # unless the user chose otherwise
    assert (objective.level, objective.geometric) == (level, is_geometric)


def test_scored_rollouts_know_their_calls() -> None:
    (scored, *_), _ = groups()
    assert [one.call.id for _, one in replace(scored, exclusion_reasons=("role not selected", None)).transitions] == [
        "b"
    ]
