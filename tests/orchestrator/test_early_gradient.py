"""The gradient of groups that finished while others ran is that of the whole update, and is computed meanwhile."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from scripted_training import Crash, ScriptedRun
from smallepisodes import call, episode
from smallpolicy import prepare_updates, small_policy

from leyden.api.wire import GroupSpec
from leyden.config import Config, ConfigError, read_config
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.objective import objective_of
from leyden.learner.policy import Policy
from leyden.learner.protocol import Update, UpdateMetrics
from leyden.orchestrator.algorithm.resolve import algorithm_of, algorithms_of
from leyden.orchestrator.credit.samples import SampleFilter, SelectedRollout, StepAccounting, select_rollouts
from leyden.orchestrator.early_gradient import EarlyGradient
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.report.metrics_log import step_metrics
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.updates import UpdateBuilder
from leyden.outcomes import Ending
from leyden.records import Call


def configured(**algorithm: Any) -> Config:
    training = {"early_gradient": True}
    return read_config({"run": "r", "agent": "a", "tasks": "t", "algorithm": algorithm, "training": training})


def groups() -> list[Sequence[SelectedRollout]]:
    """Three groups of different sizes and lengths; the rollouts of the second are worth the same."""
    sample_filter = SampleFilter(min_group=1, failure_reward=0.0, roles=None)
    found = [
        [episode(0, 1.0, [call("a", 4), call("b", 3)]), episode(1, 0.0, [call("c", 2)])],
        [episode(2, 1.0, [call("d", 2)]), episode(3, 1.0, [call("e", 5)])],
        [episode(4, 0.5, [call("f", 6)]), episode(5, 0.0, [call("g", 1)]), episode(6, 1.0, [call("h", 7)])],
    ]
    return [select_rollouts(group, sample_filter, StepAccounting()) or [] for group in found]


def in_parts(policy: Policy, config: Config, accounting: StepAccounting) -> UpdateMetrics | None:
    """Accumulate the gradient of the groups: of the last one when the others are computed."""

    async def accumulate() -> UpdateMetrics | None:
        publications, algorithm = Publications(0, [0]), algorithm_of(config)
        trained = TrainedPolicy(policy, objective_of(config), checkpoints=None)
        with LocalLearner({config.policy: trained}) as learner:
            builder = UpdateBuilder(learner, config.policy, algorithm, config.training, publications)
            early, all_groups = EarlyGradient(learner, config.policy, builder), groups()
            for group in all_groups[:2]:
                early.add(group)
                assert early._computing is not None
                await early._computing
            updates = await early.prepare(all_groups, accounting)
            return await learner.accumulate(config.policy, updates[0]) if updates else None

    return asyncio.run(accumulate())


@pytest.mark.parametrize(
    "algorithm",
    [
        {"aggregation": "rollout_mean"},
        {"aggregation": "token_mean", "advantage": "rloo"},
        {"aggregation": "call_mean", "kl": 0.1},
        {"aggregation": "constant", "length": 9, "advantage": "dr_grpo", "entropy": 0.1},
        {"aggregation": "rollout_mean", "credit": "discounted", "compare": "group"},
    ],
    ids=lambda algorithm: "-".join(map(str, algorithm.values())),
)
def test_the_gradient_is_that_of_the_whole_update(algorithm: dict[str, Any]) -> None:
    config, whole_accounting, accounting = configured(**algorithm), StepAccounting(), StepAccounting()
    whole, parts = (small_policy(reference="kl" in algorithm) for _ in range(2))
    (update,) = prepare_updates(groups(), 1, whole, config, whole_accounting)
    expected = whole.accumulate(update.samples, update.old_logprobs, objective_of(config))
    found = in_parts(parts, config, accounting)
    assert found is not None
    for ours, theirs in zip(parts.masters.gradients, whole.masters.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
    assert (found.loss, found.grad_norm, found.tokens) == (
        pytest.approx(expected.loss, abs=1e-6),
        pytest.approx(expected.grad_norm, rel=1e-5),
        expected.tokens,
    )
    assert found.statistics == pytest.approx(expected.statistics, rel=1e-5, abs=1e-7)
    weights = {credit.call: credit.weight for credit in accounting.credits}
    assert weights == pytest.approx({credit.call: credit.weight for credit in whole_accounting.credits})
    assert accounting.groups_flat == whole_accounting.groups_flat == 1


def test_the_kl_divergence_in_the_reward_is_the_mean_over_the_tokens_of_all_parts() -> None:
    config, whole_accounting, accounting = configured(kl=0.1, kl_in="reward"), StepAccounting(), StepAccounting()
    prepare_updates(groups(), 1, small_policy(reference=True), config, whole_accounting)
    in_parts(small_policy(reference=True), config, accounting)
    expected, found = (step_metrics(StepReport(1, [], one)) for one in (whole_accounting, accounting))
    assert found["training/kl_reference"] == pytest.approx(expected["training/kl_reference"], rel=1e-4)


class PartsLearner:
    """Records the samples of parts and updates of a scripted run."""

    def __init__(self, run: ScriptedRun) -> None:
        self.updates: list[list[str]] = [[]]
        self.scales: list[float] = []
        learner, accumulate = run.learner, run.learner.accumulate

        async def part(policy: str, update: Update) -> None:
            run.journal.write(f"part {len(update.samples)}")
            self.updates[-1] += [sample.call for sample in update.samples]

        async def last(policy: str, update: Update) -> UpdateMetrics:
            self.updates[-1] += [sample.call for sample in update.samples]
            self.updates.append([])
            self.scales.append(update.scale)
            return await accumulate(policy, update)

        learner.accumulate_part, learner.accumulate = part, last


def rewarded(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    return float(index % 2), [call(f"{spec.id}.{index}")], Ending.SUCCEEDED


@pytest.mark.parametrize("seed", range(8))
async def test_every_group_is_computed_once_and_some_while_others_run(tmp_path: Path, seed: int) -> None:
    settings = {"steps": 3, "tasks_per_step": 4, "early_gradient": True}
    run = ScriptedRun(tmp_path, rewarded, random=Random(seed), training=settings)
    learner = PartsLearner(run)
    state = await run.start()
    assert (state.step, state.version, state.position) == (3, 3, 12)
    for step, samples in enumerate(learner.updates[:3]):
        assert sorted(samples) == sorted(f"train-{4 * step + g}.{index}" for g in range(4) for index in range(2))
    assert learner.scales == [1 / 8] * 3  # rollouts of an update
    words = [entry.split()[0] for entry in run.journal]
    assert "wait" in words[words.index("part") :] and words.index("start") < words.index("part")


async def test_a_run_that_is_killed_while_groups_are_computed_makes_the_step_again(tmp_path: Path) -> None:
    settings = {"steps": 2, "tasks_per_step": 4, "early_gradient": True}
    run = ScriptedRun(tmp_path, rewarded, random=Random(0), training=settings)
    PartsLearner(run)
    run.journal.crash_at = 20
    with pytest.raises(Crash):
        await run.start()
    run.open()
    learner = PartsLearner(run)
    assert (await run.start()).step == 2
    assert [len(samples) for samples in learner.updates][-3:-1] == [8, 8]


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"algorithm": {"advantage": "reinforce_pp"}}, "compares all groups"),
        ({"algorithm": {"credit": "sampled"}}, "waits for continuations"),
        ({"algorithm": {"compare": "role"}}, 'compare = "role"` expects of a call what other groups .* unlike "group"'),
        ({"algorithm": {"credit": "discounted"}}, 'compare = "turn"` expects of a call what other groups'),
        ({"training": {"updates_per_step": 2}}, "several updates"),
        ({"training": {"max_staleness": 1}}, "overlaps with sampling already"),
        ({"deterministic": True}, "`deterministic` is set"),
    ],
)
def test_what_would_be_another_gradient_is_refused(section: dict[str, Any], reason: str) -> None:
    training = {"early_gradient": True, **section.pop("training", {})}
    config = read_config({"run": "r", "agent": "a", "tasks": "t", "training": training, **section})
    with pytest.raises(ConfigError, match=f"`training.early_gradient` cannot be set: .*{reason}"):
        algorithm_of(config)


def test_it_is_refused_for_several_policies() -> None:
    document = {"run": "r", "agent": "a", "tasks": "t", "training": {"early_gradient": True}}
    policies = {"writer": {"roles": "writer"}, "checker": {}}
    with pytest.raises(ConfigError, match=r"`training.early_gradient` is for one policy.* set `trained = false`"):
        read_config({**document, "policies": policies})
    one = read_config({**document, "policies": {**policies, "writer": {"roles": "writer", "trained": False}}})
    assert list(algorithms_of(one)) == ["checker"]
