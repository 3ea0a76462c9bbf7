"""The parts of a training and how they are connected; `loop.py` drives them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from msgspec import Struct

from leyden.api.client import Remote
from leyden.config import Config, policy_configs
from leyden.engine.protocol import EngineBackend
from leyden.learner.protocol import Learner, TrainerState
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.orchestrator.early_gradient import EarlyGradient
from leyden.orchestrator.health.divergence import START_FILE, Divergence
from leyden.orchestrator.health.health import Health, PolicyHealth
from leyden.orchestrator.opponents import Opponent
from leyden.orchestrator.policy_stages import PolicyStages
from leyden.orchestrator.publications import Publications
from leyden.orchestrator.publisher import Publisher
from leyden.orchestrator.report.metrics_log import read_metrics
from leyden.orchestrator.report.reports import Reports, TrainingObserver
from leyden.orchestrator.rollouts.branching import Branching
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.orchestrator.rollouts.difficulty import Difficulty
from leyden.orchestrator.rollouts.held_out import Evaluations
from leyden.orchestrator.rollouts.open_groups import OpenGroups
from leyden.orchestrator.rollouts.prefixes import Prefixes
from leyden.orchestrator.rollouts.selection import GroupSelector
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
    engines: Mapping[str, EngineBackend]
    """By policy."""
    learner: Learner
    observers: Sequence[TrainingObserver]
    """They are told of all policies."""
    logs: Mapping[str, TrainingObserver] = {}
    """By policy, who is told of its steps."""
    held: Callable[[str], AbstractContextManager[None]] = lambda policy: nullcontext()
    """Entered while model calls of a policy are held because its weights change."""


class Pipeline(Struct, frozen=True):
    """The stages of a training."""

    publications: Publications
    """By which groups grow old."""
    rollouts: StepRollouts
    policies: tuple[PolicyStages, ...]
    """The policies that are trained, at least one."""
    evaluations: Evaluations
    health: Health
    reports: Reports
    opponents: tuple[Opponent, ...] = ()
    """The policies that play earlier versions."""


def build_pipeline(
    config: Config,
    algorithms: Mapping[str, Algorithm],
    tasks: Tasks,
    parts: RunParts,
    states: Mapping[str, TrainerState],
    folder: Path,
) -> Pipeline:
    """Connect the stages of a training that starts from a state; `folder` is the run's.

    `algorithms` and `states` are by policy, for those that are trained; they are in the same step.
    """
    training = config.training
    reports = Reports([*parts.logs.values(), *parts.observers])
    collector, state = RolloutCollector(parts.remote, config.run), next(iter(states.values()))
    size, success = training.group_size, config.evaluation.success
    by_difficulty = training.task_order == "by_difficulty"
    difficulty = Difficulty(tasks.train, tasks.seed, size, success, state.task_record) if by_difficulty else None
    continues, failure_reward = training.hard_tasks == "continue", config.rollout.failure_reward
    filters = [algorithm.sample_filter for algorithm in algorithms.values()]
    prefixes = Prefixes(success, failure_reward, filters, state.prefixes) if continues else None
    source = GroupSource(tasks, size, state.position, difficulty, prefixes)
    different = len({task.id for task in (*tasks.train, *tasks.held_out)})
    files = RunFolder(folder)
    health = Health(config.run, different, read_metrics(files.metrics_file, state.policy))
    taken = TakenGroups(files.groups_file, state.policy, reports.warn)
    own = policy_configs(config)
    policies = tuple(
        _policy_stages(own[name], algorithm, parts, states[name], folder, len(states) > 1)
        for name, algorithm in algorithms.items()
    )
    first = policies[0]
    publications = first.publications
    if len(policies) > 1:  # each has its own, and none more than one in a step
        publications = Publications(training.max_staleness, range(state.step + 1))
    groups = OpenGroups(training, source, publications, taken, state.open_groups)
    selector = GroupSelector(training, algorithms, parts.remote, first.early)
    branching = None
    if first.algorithm.branch is not None:  # then no other policy is trained
        branching = Branching(first.config, first.algorithm, collector, reports, state.branch_debt)
    return Pipeline(
        publications=publications,
        rollouts=StepRollouts(config, source, groups, selector, branching, collector, health, reports),
        policies=policies,
        evaluations=Evaluations(config, tasks, collector, health, reports, state),
        health=health,
        reports=reports,
        opponents=tuple(_opponents(config, algorithms, parts, state)),
    )


def _opponents(
    config: Config, algorithms: Mapping[str, Algorithm], parts: RunParts, state: TrainerState
) -> Iterator[Opponent]:
    own = policy_configs(config)
    for name, policy in config.policies.items():
        if policy.of is not None:
            publications, held = Publications(0, (0,)), partial(parts.held, name)
            publisher = Publisher(own[name], parts.remote, parts.engines[name], parts.learner, 0, publications, held)
            foreign = algorithms[policy.of].sample_filter.foreign
            yield Opponent(name, config, publisher, foreign, state.pools.get(name, ()))


def _policy_stages(
    config: Config, algorithm: Algorithm, parts: RunParts, state: TrainerState, folder: Path, several: bool
) -> PolicyStages:
    """Connect the stages of one policy, whose configuration this is."""
    training, name, learner = config.training, config.policy, parts.learner
    publications = Publications(training.max_staleness, state.published or (state.version,))
    reports = Reports([*([parts.logs[name]] if name in parts.logs else ()), *parts.observers])
    start = checkpoint_folder(folder, name) / START_FILE
    lines = read_metrics(RunFolder(folder).metrics_file, name)
    held = partial(parts.held, name)
    builder = UpdateBuilder(learner, name, algorithm, training, publications)
    return PolicyStages(
        config=config,
        algorithm=algorithm,
        remote=parts.remote,
        learner=learner,
        publications=publications,
        divergence=Divergence(start, learner, name, training.steps),
        updates=EarlyGradient(learner, name, builder) if training.early_gradient else builder,
        publisher=Publisher(config, parts.remote, parts.engines[name], learner, state.version, publications, held),
        health=PolicyHealth(config, algorithm.position_advice, lines),
        reports=reports,
        saver=Saver(learner, reports, state),
        label=f"{name}: " if several else "",
    )
