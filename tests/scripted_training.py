"""A training whose server, engine and learner are scripted: what happens is written into one journal.

Store and checkpoints outlive a crash, as files do: `ScriptedRun.start` goes on from them.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from smallepisodes import call

from leyden.api.client import RemoteError
from leyden.api.wire import CallTimes, EventCursor, EventLog, GroupSpec
from leyden.config import Config, read_config
from leyden.engine.protocol import ModelWeights, Publication
from leyden.episodes import Episode
from leyden.learner.protocol import Logprobs, SampleEvaluation, TrainerState, Update, UpdateMetrics
from leyden.learner.sample import Sample
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.orchestrator.loop import Trainer
from leyden.orchestrator.pipeline import RunParts, build_pipeline
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.evaluation import EvaluationResult
from leyden.orchestrator.rollouts.tasks import Tasks
from leyden.outcomes import Ending, Outcome
from leyden.records import (
    Attempt,
    Call,
    Event,
    EventKind,
    Group,
    Origin,
    Reward,
    Rollout,
    State,
    StepCredits,
    Task,
    Version,
    VersionRun,
)


class Crash(BaseException):
    """The process is killed here."""


class Journal(list[str]):
    """What happened, in order. At entry number `crash_at` the process is killed."""

    crash_at: int | None = None
    on_write: Callable[[], None] = staticmethod(lambda: None)

    def write(self, entry: str) -> None:
        if self.crash_at is not None and len(self) == self.crash_at:
            raise Crash(entry)
        self.append(entry)
        self.on_write()


Script = Callable[[GroupSpec, int], tuple[float | None, Sequence[Call], Ending]]
"""From a group and the index of a rollout to its reward, its calls and its ending."""


def one_call(spec: GroupSpec, index: int) -> tuple[float | None, Sequence[Call], Ending]:
    """Every second rollout succeeds."""
    return float(index % 2), [call(f"{spec.id}.{index}")], Ending.SUCCEEDED


class ScriptedStore:
    """The server of a run, whose rollouts are finished as soon as they are requested."""

    def __init__(self, script: Script) -> None:
        self.script, self.journal = script, Journal()
        self.sampled: dict[str, list[Episode]] = {}
        self.requested: list[GroupSpec] = []
        self.credits: dict[int, set[str]] = {}
        """By step, the groups whose calls it has credited or left out."""
        self.versions = defaultdict[str, list[int]](list)
        """The published versions of each policy."""
        self._held = set[str]()
        """The policies whose calls wait for a publication."""
        self.recorded: Callable[[Episode], Episode] = lambda episode: episode
        """Makes what is recorded of a rollout from what the script says."""

    async def enqueue(self, run: str, spec: GroupSpec) -> Group:
        self._check(spec)
        self.requested.append(spec)
        if spec.id not in self.sampled:
            self.journal.write(f"sample {spec.id}")
            self.sampled[spec.id] = [self._episode(run, spec, index) for index in range(spec.size)]
        return Group(spec.id, run, spec.task.id, spec.purpose, spec.size, 0, 0.0, 1.0, spec.origin)

    async def get_group(self, run: str, group: str) -> Group:
        first = (await self.group_episodes(run, group))[0]
        return Group(
            group,
            run,
            first.task.id,
            first.rollout.purpose,
            len(self.sampled[group]),
            0,
            0.0,
            origin=first.rollout.origin,
        )

    async def group_episodes(self, run: str, group: str) -> list[Episode]:
        if group not in self.sampled:
            raise RemoteError(404, "not_found", group)
        return self.sampled[group]

    async def follow_events(self, run: str, cursor: EventCursor) -> EventLog:
        assert not cursor.wait, "every group is finished when it is requested"
        return EventLog((), cursor.after)

    async def get_call_times(self, run: str) -> CallTimes:
        return CallTimes()

    async def record_credits(self, run: str, credits: StepCredits) -> None:
        self.journal.write(f"credits {credits.step}")
        self.credits[credits.step] = {credit.attempt.rsplit(".", 2)[0] for credit in credits.calls}

    async def hold_calls(self, run: str, policy: str) -> None:
        self.journal.write("hold")
        self._held.add(policy)

    async def publish_version(self, run: str, version: Version) -> None:
        self.journal.write(f"version {version.number}")
        self._held.remove(version.policy)
        self.versions[version.policy].append(version.number)

    def _check(self, spec: GroupSpec) -> None:
        first = self.sampled[spec.id][0] if spec.id in self.sampled else None
        if first is not None and (first.task, first.rollout.origin) != (spec.task, spec.origin):
            raise RemoteError(409, "conflict", f"group {spec.id!r} exists with another task or origin")

    def _episode(self, run: str, spec: GroupSpec, index: int) -> Episode:
        reward, calls, ending = self.script(spec, index)
        id = f"{spec.id}.{index}"
        rollout = Rollout(
            id, run, spec.id, spec.task.id, index, spec.purpose, State.FINISHED, 1, 3, 0.0, origin=spec.origin
        )
        if spec.origin is not None:
            calls = [*self._replayed(spec.origin), *calls]
        attempt = Attempt(f"{id}.1", run, id, 1, "w", None, 0.0, 9.0, 1.0, Outcome(ending))
        given = (Reward("final", reward),) if reward is not None else ()
        return self.recorded(Episode(rollout, attempt, spec.task, tuple(calls), (), given))

    def _replayed(self, origin: Origin) -> list[Call]:
        attempts = (episode for group in self.sampled.values() for episode in group)
        found = next(episode for episode in attempts if episode.attempt.id == origin.attempt)
        return [replace(one, origin=one.origin or origin.attempt) for one in found.calls[: origin.calls]]


class SlowStore(ScriptedStore):
    """The server of a run whose rollouts take time: each samples a token now and then, by the version that is served.

    Time passes while the trainer waits for groups, and whenever something happens.
    """

    def __init__(self, script: Script, random: Random) -> None:
        super().__init__(script)
        self._random, self._log = random, list[str]()
        self._running: dict[str, list[list[dict[str, int]]]] = {}
        """By group, the versions of all policies when the tokens of its rollouts so far were sampled."""
        self._missing: dict[str, list[int]] = {}
        """By group, how many tokens its rollouts still sample."""
        self._parked: set[str] = set()
        """Groups that do not run until they are requested again."""
        self.published: dict[str, list[int]] = {}
        """The versions of each policy, without those that a kill has undone."""
        self._served: dict[str, int] = {}
        """The newest version of each policy, unless that is 0."""

    async def publish_version(self, run: str, version: Version) -> None:
        await super().publish_version(run, version)
        self._served = {**self._served, version.policy: version.number}
        self.published.setdefault(version.policy, [0]).append(version.number)

    def restart(self, **policies: int) -> None:
        """Begin to serve these versions after a kill: attempts start over when they are requested, if workers died.

        Those of evaluations do so too if they live.
        """
        for policy, version in policies.items():
            self.published[policy] = [one for one in self.published.get(policy, [0]) if one <= version]
        self._served = policies
        worker_died = self._random.random() < 0.5
        self._parked = {name for name in self._running if worker_died or name.startswith("eval")}
        for name in self._parked:
            self._running[name] = [[] for _ in self._running[name]]

    async def enqueue(self, run: str, spec: GroupSpec) -> Group:
        self._check(spec)
        self._parked.discard(spec.id)
        if spec.id not in self._missing:
            self.journal.write(f"sample {spec.id}")
            heavy = self._random.choice((3, 3, 3, 30))
            self._missing[spec.id] = [self._random.randint(1, heavy) for _ in range(spec.size)]
            self._running[spec.id] = [[] for _ in range(spec.size)]
            self.sampled[spec.id] = [self._episode(run, spec, index) for index in range(spec.size)]
        finished = None if spec.id in self._running else 1.0
        return Group(spec.id, run, spec.task.id, spec.purpose, spec.size, 0, 0.0, finished, spec.origin)

    async def follow_events(self, run: str, cursor: EventCursor) -> EventLog:
        while cursor.wait and len(self._log) <= cursor.after:
            assert self._running, "nothing runs that could finish"
            self.journal.write("wait")
            await asyncio.sleep(0)
        events = [
            Event(number, run, EventKind.GROUP_FINISHED, name, 0.0, {})
            for number, name in enumerate(self._log[cursor.after :], cursor.after + 1)
        ]
        return EventLog(tuple(events), len(self._log))

    def tick(self) -> None:
        """Let time pass."""
        for name, rollouts in [*self._running.items()]:
            if name in self._parked:
                continue
            for versions, missing in zip(rollouts, self._missing[name], strict=True):
                if len(versions) < missing and self._random.random() < 0.5:
                    versions.append(self._served)
            if all(len(versions) == missing for versions, missing in zip(rollouts, self._missing[name], strict=True)):
                del self._running[name]
                self._log.append(name)
                self.sampled[name] = [
                    replace(one, calls=tuple(_with_versions(each, versions) for each in one.calls))
                    for one, versions in zip(self.sampled[name], rollouts, strict=True)
                ]


def _with_versions(call: Call, versions: Sequence[dict[str, int]]) -> Call:
    own = groupby(version.get(call.policy, 0) for version in versions)
    runs = tuple(VersionRun(len(list(some)), number) for number, some in own)
    count = len(versions)
    return replace(call, completion_ids=tuple(range(count)), logprobs=(-1.0,) * count, versions=runs)


class ScriptedBackend:
    """An engine, as the training process uses it."""

    def __init__(self, journal: Journal, shares_parameters: bool, sleeps: bool) -> None:
        self._journal = journal
        self.shares_parameters, self.sleeps_while_training = shares_parameters, sleeps

    async def sleep(self) -> None:
        self._journal.write("sleep")

    @asynccontextmanager
    async def changing_weights(self, version: int) -> AsyncIterator[None]:
        self._journal.write(f"change to {version}")
        yield
        self._journal.write("changed")

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        self._journal.write(f"publish {version}")
        return Publication(0.0, 0)


class ScriptedLearner:
    """A learner whose weights are a digest of all updates since the start."""

    def __init__(self, journal: Journal, checkpoints: dict[int, tuple[TrainerState, str]]) -> None:
        self._journal, self._checkpoints = journal, checkpoints
        self.digest, self._gradient = "start", ""
        self.full_disks = 0
        """So often writing a checkpoint fails because the disk is full."""
        self.disk_works = asyncio.Event()
        """Until it is set, a write takes longer."""
        self.disk_works.set()

    async def restore(self, policy: str) -> TrainerState:
        if not self._checkpoints:
            return TrainerState(policy=policy)
        state, self.digest = self._checkpoints[max(self._checkpoints)]
        return state

    async def start_step(self, policy: str, step: int) -> float:
        self._journal.write(f"start {step}")
        return 0.1

    async def evaluate(self, policy: str, samples: Sequence[Sample]) -> SampleEvaluation:
        assert samples
        self._journal.write(f"evaluate {len(samples)}")
        return SampleEvaluation()

    async def logprobs(self, policy: str, samples: Sequence[Sample], reference: bool = False) -> list[Logprobs]:
        self._journal.write(f"logprobs {len(samples)}")
        return [np.zeros(len(sample.token_indices)) for sample in samples]

    async def divergence(self, policy: str, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> float:
        assert samples
        self._journal.write("divergence")
        return 0.0

    async def accumulate(self, policy: str, update: Update) -> UpdateMetrics:
        self._gradient = " ".join(f"{sample.call}:{sample.advantage:+.2f}" for sample in update.samples)
        self._journal.write(f"accumulate {self._gradient}")
        tokens = sum(len(sample.token_indices) for sample in update.samples)
        return UpdateMetrics(0.0, 1.0, tokens, tokens, 0, {"entropy": 1.0})

    async def apply(self, policy: str) -> None:
        self._journal.write("apply")
        self.digest = blake2b(f"{self.digest}/{self._gradient}".encode(), digest_size=4).hexdigest()

    def weights(self, policy: str) -> Any:
        return self.digest

    async def save(self, policy: str, state: TrainerState) -> None:
        self._journal.write(f"copy {state.step}")
        self._copy = state, self.digest

    async def finish_save(self, policy: str) -> None:
        if self.full_disks:
            self.full_disks -= 1
            raise OSError(28, "No space left on device")
        state, digest = self._copy
        await self.disk_works.wait()
        self._journal.write(f"save {state.step}")
        self._checkpoints[state.step] = state, digest

    async def version_of(self, policy: str, step: int) -> int:
        return self._checkpoints[step][0].version if step else 0

    async def load(self, policy: str, step: int) -> None:
        self._journal.write(f"load {step}")
        self.digest = self._checkpoints[step][1] if step else "start"

    async def free_memory(self) -> None:
        self._journal.write("free memory")


class Observer:
    """Writes into the journal what is reported."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self.warnings = journal, list[str]()
        self.reports: list[StepReport] = []
        self.full_disks = 0

    def progress(self, step: int, done: int, total: int, what: str) -> None:
        pass

    def step(self, report: StepReport, left_s: float) -> None:
        if self.full_disks:
            self.full_disks -= 1
            raise OSError(28, "No space left on device")
        self._journal.write(f"report {report.step}")
        self.reports.append(report)

    def measured(self, step: int, measured: EvaluationResult, episodes: Sequence[Episode]) -> None:
        self._journal.write(f"measured {step}")

    def tested(self, step: int, measured: EvaluationResult) -> None:
        self._journal.write(f"tested {step}")

    def warn(self, message: str) -> None:
        self.warnings.append(message)


class ScriptedRun:
    """A run: what outlives its process, and the process that trains now."""

    def __init__(
        self,
        folder: Path,
        script: Script = one_call,
        *,
        shares_parameters: bool = False,
        sleeps: bool = False,
        held_out: int = 0,
        test: int = 0,
        random: Random | None = None,
        **settings: Any,
    ) -> None:
        training = {"steps": 2, "tasks_per_step": 2, "group_size": 2, **settings.pop("training", {})}
        document = {"run": "r", "agent": "a", "tasks": "t", "training": training, **settings}
        self.config: Config = read_config(document)
        train, held, tested = (
            tuple(Task(f"{name}{number}", {}) for number in range(count))
            for name, count in (("t", 5), ("h", held_out), ("e", test))
        )
        self.tasks = Tasks(train, held, 0, tested)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shares, self._sleeps = folder, shares_parameters, sleeps
        self.store = ScriptedStore(script) if random is None else SlowStore(script, random)
        self.checkpoints: dict[int, tuple[TrainerState, str]] = {}
        self.stop = asyncio.Event()
        self.open()

    def open(self) -> None:
        """Begin a new process, with a journal of its own."""
        self.journal = self.store.journal = Journal()
        self.learner = ScriptedLearner(self.journal, self.checkpoints)
        self.observer = Observer(self.journal)
        if isinstance(self.store, SlowStore):
            self.journal.on_write = self.store.tick

    async def start(self) -> TrainerState:
        """Train from the latest checkpoint."""
        state = await self.learner.restore(self.config.policy)
        backend: Any = ScriptedBackend(self.journal, self._shares, self._sleeps)
        store: Any = self.store
        name = self.config.policy
        parts = RunParts(store, {name: backend}, self.learner, (self.observer,))
        algorithms = {name: algorithm_of(self.config)}
        pipeline = build_pipeline(self.config, algorithms, self.tasks, parts, {name: state}, self._folder)
        return (await Trainer(self.config, pipeline, {name: state}).run(self.stop))[name]

    async def kill(self, training: Awaitable[object], at: int) -> None:
        """Train until the process writes this entry of its journal, and begin a new one."""
        self.journal.crash_at = at
        with pytest.raises(Crash):
            await training
        self.open()

    def with_settings(self, **training: Any) -> None:
        """Change the configuration for the next start."""
        self.config = replace(self.config, training=replace(self.config.training, **training))
