"""The parts of a training and how they are connected; `loop.py` drives them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from msgspec import Struct

from leyden.api.client import Remote
from leyden.config import Config
from leyden.engine.protocol import EngineBackend
from leyden.learner.protocol import Learner, TrainerState
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.orchestrator.credit.recording import CreditRecorder
from leyden.orchestrator.health.divergence import START_FILE, Divergence
from leyden.orchestrator.health.health import Health
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.publisher import Publisher
from leyden.orchestrator.report.metrics_log import read_metrics
from leyden.orchestrator.report.observer import TrainingObserver
from leyden.orchestrator.report.reports import Reports
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.orchestrator.rollouts.difficulty import Difficulty
from leyden.orchestrator.rollouts.held_out import Evaluations
from leyden.orchestrator.rollouts.source import GroupSource
from leyden.orchestrator.rollouts.step_rollouts import StepRollouts
from leyden.orchestrator.rollouts.taken_groups import TakenGroups
from leyden.orchestrator.rollouts.tasks import Tasks
from leyden.orchestrator.saving import Saver
from leyden.orchestrator.updates import UpdateBuilder
from leyden.runs.checkpoint_files import checkpoint_folder
from leyden.runs.run_folder import RunFolder


class RunParts(Struct, frozen=True):
    """What a training uses and does not own."""

    remote: Remote
    engine: EngineBackend
    learner: Learner
    observers: Sequence[TrainingObserver]
    held: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while model calls are held because weights change."""


class Pipeline(Struct, frozen=True):
    """The stages of a training."""

    publications: Publications
    source: GroupSource
    rollouts: StepRollouts
    divergence: Divergence
    updates: UpdateBuilder
    credits: CreditRecorder
    learner: Learner
    publisher: Publisher
    evaluations: Evaluations
    health: Health
    reports: Reports
    saver: Saver


def build_pipeline(
    config: Config, algorithm: Algorithm, tasks: Tasks, parts: RunParts, state: TrainerState, folder: Path
) -> Pipeline:
    """Connect the stages of a training that starts from a state; `folder` is the run's."""
    training, policy = config.training, config.policy
    reports, collector = Reports(parts.observers), RolloutCollector(parts.remote, config.run)
    size, success = training.group_size, config.evaluation.success
    by_difficulty = training.task_order == "by_difficulty"
    difficulty = Difficulty(tasks.train, tasks.seed, size, success, state.task_record) if by_difficulty else None
    source = GroupSource(tasks, size, state.position, difficulty)
    different = len({task.id for task in (*tasks.train, *tasks.held_out)})
    files = RunFolder(folder)
    lines = read_metrics(files.metrics_file, policy)
    taken = TakenGroups(files.groups_file, policy, reports.warn)
    health = Health(config, different, algorithm.position_advice, lines)
    start = checkpoint_folder(folder, policy) / START_FILE
    publications = Publications(training.max_staleness, state.published or (state.version,))
    return Pipeline(
        publications=publications,
        source=source,
        rollouts=StepRollouts(
            config, algorithm, source, collector, health, reports, publications, taken, state.open_groups
        ),
        divergence=Divergence(start, parts.learner, policy, training.steps),
        updates=UpdateBuilder(parts.learner, policy, algorithm, training, publications),
        credits=CreditRecorder(parts.remote, config.run, policy),
        learner=parts.learner,
        publisher=Publisher(config, parts.remote, parts.engine, parts.learner, state.version, publications, parts.held),
        evaluations=Evaluations(config, tasks, collector, health, reports, state),
        health=health,
        reports=reports,
        saver=Saver(parts.learner, reports, state),
    )
