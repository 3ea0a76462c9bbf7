"""A scripted training of several policies: each has a learner and an engine of its own, and what it credits is kept."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripted_training import Crash, Journal, ScriptedBackend, ScriptedLearner, ScriptedRun, SlowStore
from smallepisodes import call

from leyden.api.wire import GroupSpec
from leyden.config import trained_policies
from leyden.engine.protocol import EngineLost, ModelWeights, Publication
from leyden.learner.protocol import TrainerState
from leyden.orchestrator.algorithm.resolve import algorithms_of
from leyden.orchestrator.loop import Trainer
from leyden.orchestrator.pipeline import RunParts, build_pipeline
from leyden.outcomes import Ending
from leyden.records import Call, StepCredits

TWO: dict[str, Any] = {"writer": {"roles": "writer"}, "checker": {}}
Checkpoints = dict[str, dict[int, tuple[TrainerState, str]]]


def two_calls(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """Every second rollout succeeds; each policy makes a call."""
    calls = [call(f"{spec.id}.{index}.{name}", policy=name) for name in ("writer", "checker")]
    return float(index % 2), calls, Ending.SUCCEEDED


class NamedJournal:
    """Writes what happens to one policy into the journal of a run."""

    def __init__(self, journal: Journal, name: str) -> None:
        self._journal, self._name = journal, name

    def write(self, entry: str) -> None:
        self._journal.write(f"{self._name} {entry}")


class EveryLearner:
    """A learner of several policies, each of which is scripted."""

    def __init__(self, learners: dict[str, ScriptedLearner]) -> None:
        self.learners = learners

    def __getattr__(self, method: str) -> Any:
        return lambda policy, *arguments, **named: getattr(self.learners[policy], method)(policy, *arguments, **named)


class FailingBackend(ScriptedBackend):
    """An engine that is lost when it should get a version."""

    def __init__(self, journal: Any, version: int) -> None:
        super().__init__(journal, False, False)
        self._fails_at = version

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        if version == self._fails_at:
            raise EngineLost("the engine has died")
        return await super().publish(weights, version)


class PoliciesRun(ScriptedRun):
    """A scripted run with several policies. What it credits is kept by policy."""

    def __init__(self, folder: Path, policies: dict[str, Any], script: Any = two_calls, **settings: Any) -> None:
        self.saved: Checkpoints = {name: {} for name in policies}
        super().__init__(folder, script, policies=policies, **settings)
        self.failing_engine: tuple[str, int] | None = None
        """The policy whose engine fails, once, and the version that it does not get."""
        self.credited: dict[tuple[str, int], StepCredits] = {}
        record = self.store.record_credits

        async def record_credits(run: str, credits: StepCredits) -> None:
            self.credited[credits.policy, credits.step] = credits
            await record(run, credits)

        self.store.record_credits = record_credits

    async def train(self) -> dict[str, TrainerState]:
        """Train from the last step of which every policy has a checkpoint."""
        names = trained_policies(self.config)
        common = max(set.intersection(*(set(self.saved[name]) for name in names)), default=0)
        for name in names:
            self.saved[name] = {step: found for step, found in self.saved[name].items() if step <= common}
        journals: dict[str, Any] = {name: NamedJournal(self.journal, name) for name in names}
        learner: Any = EveryLearner({name: self.new_learner(name, journals[name]) for name in names})
        backends: Any = {name: ScriptedBackend(journals[name], False, False) for name in names}
        if self.failing_engine is not None:
            name, version = self.failing_engine
            backends[name], self.failing_engine = FailingBackend(journals[name], version), None
        store: Any = self.store
        self.learners = learner.learners
        states = {name: await learner.restore(name) for name in names}
        if isinstance(self.store, SlowStore):
            self.store.restart(**{name: state.version for name, state in states.items()})
        parts = RunParts(store, backends, learner, (self.observer,))
        pipeline = build_pipeline(self.config, algorithms_of(self.config), self.tasks, parts, states, self._folder)
        return await Trainer(self.config, pipeline, states).run(self.stop)

    def new_learner(self, policy: str, journal: Any) -> ScriptedLearner:
        """The learner of a policy in a new process."""
        return ScriptedLearner(journal, self.saved[policy])

    async def killed_at(self, entry: int) -> bool:
        """Train until the process is killed, and begin a new one; false if the training ended before."""
        self.journal.crash_at = entry
        try:
            await self.train()
        except Crash:
            self.open()
            return True
        self.journal.crash_at = None
        return False

    def updates(self, policy: str) -> list[str]:
        """The gradients of a policy, as its samples and advantages."""
        return [entry for entry in self.journal if entry.startswith(f"{policy} accumulate")]
