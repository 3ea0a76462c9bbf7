"""Policies that are trained together compute what each would alone, with real gradients in double precision."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted_training import ScriptedBackend, ScriptedRun
from smallepisodes import call, episode
from smallpolicy import compute_in_double, small_policy

from leyden.api.wire import GroupSpec
from leyden.config import Config, policy_configs, read_config, trained_policies
from leyden.episodes import Episode
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.objective import objective_of
from leyden.learner.policy import Policy
from leyden.learner.protocol import TrainerState
from leyden.orchestrator.algorithm.resolve import algorithms_of
from leyden.orchestrator.credit.advantages import StepInputs, compute_advantages
from leyden.orchestrator.credit.samples import StepAccounting, make_samples, select_rollouts
from leyden.orchestrator.loop import Trainer
from leyden.orchestrator.pipeline import RunParts, build_pipeline
from leyden.outcomes import Ending
from leyden.records import Call, Reward, RewardKind, Task

SEEDS = {"writer": 1, "checker": 2}
"""Of the weights of each policy."""
POLICIES: dict[str, Any] = {
    "writer": {"roles": "writer", "rewards": ["wrote"]},
    "checker": {"learning_rate": 0.02, "algorithm": {"advantage": "rloo"}},
}


BASE: dict[str, Any] = {"run": "r", "agent": "a", "tasks": "t", "policies": POLICIES}
ALGORITHMS = {
    credit: algorithms_of(read_config({**BASE, "algorithm": {"credit": credit}}))
    for credit in ("identical", "stepwise")
}


@pytest.fixture
def _doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_double(monkeypatch, "llama")


def some_calls(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """One to three calls of each policy, in any order, with random tokens."""
    random = Random(f"{spec.id}.{index}")
    names = [name for name in SEEDS for _ in range(random.randint(1, 3))]
    random.shuffle(names)
    calls = [call(f"{spec.id}.{index}.{number}", policy=name) for number, name in enumerate(names)]
    tokens = [tuple(random.randrange(64) for _ in range(random.randint(1, 6))) for _ in (*calls, *calls)]
    return (
        random.random(),
        [
            replace(one, prompt_ids=prompt, completion_ids=answer, logprobs=tuple(-random.random() for _ in answer))
            for one, prompt, answer in zip(calls, tokens[::2], tokens[1::2], strict=True)
        ],
        Ending.SUCCEEDED,
    )


class RealPolicies(ScriptedRun):
    """A run with scripted rollouts and real policies. The gradient of every update is kept."""

    def __init__(self, folder: Path, policies: dict[str, Any]) -> None:
        training: dict[str, Any] = {"steps": 2, "updates_per_step": 2, "group_size": 3, "learning_rate": 0.01}
        super().__init__(folder, some_calls, policies=policies, training=training)

        def rewarded(found: Episode) -> Episode:
            (total,), random = found.rewards, Random(f"rewards {found.rollout.id}")
            step = Reward("s", random.random(), RewardKind.STEP, call=random.choice(found.calls).id)
            return replace(found, rewards=(total, Reward("w", random.random(), name="wrote"), step))

        self.store.recorded = rewarded
        self.policies = {name: self._policy(own) for name, own in policy_configs(self.config).items()}
        self.gradients: dict[str, list[torch.Tensor]] = {name: [] for name in policies}

    def _policy(self, own: Config) -> Policy:
        return small_policy(SEEDS[own.policy], dtype=torch.float64, learning_rate=own.training.learning_rate)

    async def train(self) -> None:
        own, names = policy_configs(self.config), trained_policies(self.config)
        backends: Any = {name: ScriptedBackend(self.journal, False, False) for name in names}
        no_checkpoints: Any = None
        trained = {name: TrainedPolicy(self.policies[name], objective_of(own[name]), no_checkpoints) for name in names}
        with LocalLearner(trained) as learner:
            apply = learner.apply

            async def keep_gradient(policy: str) -> None:
                found = self.policies[policy].parameters.values()
                self.gradients[policy].append(torch.cat([one.grad.flatten() for one in found if one.grad is not None]))
                await apply(policy)

            async def save_nothing(policy: str, state: TrainerState | None = None) -> None: ...

            learner.apply, learner.save, learner.finish_save = keep_gradient, save_nothing, save_nothing
            store: Any = self.store
            parts = RunParts(store, backends, learner, (self.observer,))
            states = {name: TrainerState(policy=name) for name in names}
            pipeline = build_pipeline(self.config, algorithms_of(self.config), self.tasks, parts, states, self._folder)
            await Trainer(self.config, pipeline, states).run(self.stop)

    def weights(self, name: str) -> torch.Tensor:
        return torch.cat([one.detach().flatten() for one in self.policies[name].parameters.values()])


@pytest.mark.usefixtures("_doubles")
async def test_every_gradient_and_all_weights_are_those_of_a_policy_trained_alone(tmp_path: Path) -> None:
    both = RealPolicies(tmp_path / "both", POLICIES)
    await both.train()
    for name in SEEDS:
        others_fixed = {one: {**policy, "trained": one == name} for one, policy in POLICIES.items()}
        alone = RealPolicies(tmp_path / name, others_fixed)
        await alone.train()
        assert len(both.gradients[name]) == len(alone.gradients[name]) == 4
        for together, single in zip(both.gradients[name], alone.gradients[name], strict=True):
            assert single.norm() > 1e-4
            torch.testing.assert_close(together, single, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(both.weights(name), alone.weights(name), rtol=1e-9, atol=1e-9)
        assert not torch.equal(both.weights(name), small_weights(name))


def small_weights(name: str) -> torch.Tensor:
    policy = small_policy(SEEDS[name], dtype=torch.float64)
    return torch.cat([one.detach().flatten() for one in policy.parameters.values()])


def updates_of(group: Sequence[Episode], credit: str) -> dict[str, list[Any]]:
    """What each policy learns from a group: its samples and their advantages, without their places in the rollout."""
    found: dict[str, list[Any]] = {}
    for name, algorithm in ALGORITHMS[credit].items():
        selected = select_rollouts(group, replace(algorithm.sample_filter, min_group=1), StepAccounting())
        groups = [selected] if selected is not None else []
        estimator, samples = algorithm.advantage_estimator, make_samples(groups)
        samples = compute_advantages(groups, samples, StepInputs(), estimator, StepAccounting()) if groups else []
        found[name] = [replace(one, call_index=0) for one in samples]
    return found


def disturbed(made: Episode, policy: str, random: Random) -> Episode:
    """An episode in which everything that is another policy's alone is another: tokens, number of calls, rewards."""
    spec = GroupSpec(f"other{random.random()}", made.task, 4)
    _, others, _ = some_calls(spec, made.rollout.index)
    theirs = [one for one in others if one.policy != policy]
    own = [one for one in made.calls if one.policy == policy]
    names = {one.id for one in own}
    kept = [
        reward
        for reward in made.rewards
        if (reward.call in names if reward.kind is RewardKind.STEP else policy == "writer" or reward.name != "wrote")
    ]
    step = Reward("t", random.random(), RewardKind.STEP, call=random.choice(theirs).id)
    foreign = [Reward("w", random.random(), name="wrote")] if policy == "checker" else []
    calls = sorted([*own, *theirs], key=lambda one: random.random() if one in theirs else 2)
    return replace(made, calls=tuple(calls), rewards=(*kept, step, *foreign))


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([*ALGORITHMS]))
def test_nothing_of_one_policys_calls_reaches_the_update_of_another(seed: int, credit: str) -> None:
    random, group = Random(seed), []
    for index in range(4):
        total, calls, _ = some_calls(GroupSpec(f"g{seed}", Task("t", {}), 4), index)
        step = Reward("s", random.random(), RewardKind.STEP, call=random.choice(calls).id)
        wrote = Reward("w", random.random(), name="wrote")
        group.append(episode(index, total, calls, Ending.SUCCEEDED, wrote, step))
    before = updates_of(group, credit)
    for name in SEEDS:
        after = updates_of([disturbed(one, name, random) for one in group], credit)
        assert before[name] and after[name] == before[name]
        assert {one.call for one in before[name]} == {
            one.id for made in group for one in made.calls if one.policy == name
        }
