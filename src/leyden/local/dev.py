"""`leyden dev`: runs a few rollouts without training and reports exactly what was recorded and what was not."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from leyden.api.wire import GroupSpec
from leyden.background import start_background
from leyden.config import Config, ConfigError, policy_configs
from leyden.episodes import Episode
from leyden.estimates import estimate
from leyden.learner.objective import objective_of
from leyden.local.notes import print_note, stderr_console
from leyden.local.policies import load_policies
from leyden.local.readable import Readable
from leyden.local.replaying import ReplayReport, replay_rollouts
from leyden.local.stack import local_stack
from leyden.orchestrator.algorithm.resolve import Algorithm, algorithms_of
from leyden.orchestrator.credit.advantages import StepInputs, compute_advantages
from leyden.orchestrator.credit.samples import SelectedRollout, StepAccounting, make_samples, select_rollouts
from leyden.orchestrator.health.failures import count_alike
from leyden.orchestrator.health.position import PositionDetector
from leyden.orchestrator.report.progress_line import ProgressLine
from leyden.orchestrator.rollouts.collector import RolloutCollector
from leyden.orchestrator.rollouts.tasks import read_tasks
from leyden.outcomes import MEANING
from leyden.records import Call, Purpose
from leyden.rl.signals import SignalKind, SignalRules, automatic
from leyden.rl.signals import find as find_signals
from leyden.rl.signals.tool_calls import tool_calls_of
from leyden.runs.run_folder import RunFolder

_PROGRESS_EVERY_S = 30.0


class DevReport(Readable, frozen=True):
    """Counts of what was recorded for some rollouts."""

    rollouts: int
    outcomes: dict[str, int]
    """Rollouts by ending."""
    messages: dict[str, int]
    """The messages of rollouts that did not succeed and how many had each, the commonest first.

    Of messages that differ only in numbers and addresses it is the first.
    """
    calls: int
    roles: dict[str, int]
    """Calls by role."""
    prompts: dict[str, int]
    """Calls by how their prompt was built, with the reason if it was rendered again."""
    tools: dict[str, int]
    """Tool calls by tool."""
    tools_failed: dict[str, int]
    """Failed tool calls by tool."""
    rewards: tuple[float, ...]
    reward_error: float | None
    """The standard error of the mean of the rewards, clustered by task."""
    failures: int
    """Number of rewards that are `failure_reward`."""
    failure_reward: float
    trained: int
    """Rollouts that training would use."""
    calls_trained: int
    tokens_trained: int
    groups: int
    groups_flat: int
    """Groups of several rollouts without an advantage, such as those with equal rewards: nothing of them is trained."""
    position_bias: str | None
    """That the mean advantage of calls depends on their position, and what to set; None: nothing shows it."""
    left_out: dict[str, int]
    """Rollouts and calls that training would not use, by reason."""
    folder: Path
    run: str
    replay: ReplayReport | None = None
    """How much of the rollouts the agent repeats if it gets the recorded answers; None: it was not tried."""

    @property
    def mean_reward(self) -> float | None:
        """The mean of the rewards; None if there are none."""
        return fmean(self.rewards) if self.rewards else None


async def run_dev(
    config: Config, tasks: int = 4, rollouts: int = 2, replay: bool = False
) -> tuple[DevReport, list[Episode]]:
    """Run the agent a few times, sampled as in training, and report what was recorded.

    With `replay` each rollout then runs again, answered from its record.
    """
    if replay and not config.rollout.replay:
        raise ConfigError("`rollout.replay` is false: nothing is replayed in this run, so there is nothing to try")
    for own in policy_configs(config).values():
        objective_of(own)  # refuses a loss that cannot be loaded
    chosen = read_tasks(config).train[:tasks]
    policies = load_policies(config)
    folder = RunFolder.renewed(config, "dev")
    run = folder.path.name
    episodes: list[Episode] = []

    async def collect(collector: RolloutCollector, line: ProgressLine) -> ReplayReport | None:
        specs = [GroupSpec(f"dev-{number}", task, rollouts, Purpose.DEV) for number, task in enumerate(chosen)]
        total = len(specs) * rollouts
        line.show(f"0 of {total} rollouts")
        printing = start_background(print_progress(lambda: len(episodes), total, config), "printing the progress")
        try:
            async for _, group in collector.gather(specs):
                episodes.extend(group)
                line.show(f"{len(episodes)} of {total} rollouts")
        finally:
            printing.cancel()
        if not replay:
            return None
        line.show(f"{total} rollouts run again, answered from their record")
        return await replay_rollouts(collector, episodes)

    with folder.acquire(config):
        async with local_stack(config, folder.path, policies, run) as stack:
            with ProgressLine(stderr_console()) as line:
                replayed = await stack.run(collect(RolloutCollector(stack.remote, run), line))
    return replace(summarise(config, episodes, folder.path), replay=replayed), episodes


async def print_progress(done: Callable[[], int], total: int, config: Config) -> None:
    """Print from time to time how many rollouts are done, if no terminal shows it."""
    while not stderr_console().is_terminal:
        await asyncio.sleep(_PROGRESS_EVERY_S)
        print_note(f"{done()} of {total} rollouts done; the limit is {config.rollout.time_limit_s:g} s")


def summarise(config: Config, episodes: Sequence[Episode], folder: Path) -> DevReport:
    """Count what the episodes contain and what training would use of them."""
    members: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        members[episode.rollout.group].append(episode)
    algorithms = algorithms_of(config)
    used = {name: _used(members.values(), algorithm) for name, algorithm in algorithms.items()}
    trained = [call for one in used.values() for call in one.calls]
    left_out = Counter[str]()
    for name, one in used.items():
        label = f"{name}: " if len(used) > 1 else ""
        calls = {f"call: {why}": count for why, count in one.accounting.calls_excluded.items()}
        if len(used) > 1:
            calls.pop("call: another policy", None)
        left_out.update({f"{label}{why}": count for why, count in {**one.accounting.excluded, **calls}.items()})
    outcomes, roles, prompts = Counter[str](), Counter[str](), Counter[str]()
    called, failed = Counter[str](), Counter[str]()
    messages = Counter[str]()
    rewards: dict[str, list[float]] = defaultdict(list)
    failures = 0
    for example, count in count_alike(episode.attempt.outcome for episode in episodes if episode.attempt.outcome):
        if example.message:
            messages[example.message] += count
    for episode in episodes:
        outcome = episode.attempt.outcome
        assert outcome is not None
        outcomes[str(outcome.ending)] += 1
        reward = episode.final_reward(config.rollout.failure_reward)
        if reward is not None:
            rewards[episode.rollout.task].append(reward)
            failures += MEANING[outcome.ending].reward == "failure_reward"
        for call in episode.calls:
            roles[episode.role(call) or "(none)"] += 1
            prompts[
                f"{call.prompt_origin}: {call.origin_reason}" if call.origin_reason else str(call.prompt_origin)
            ] += 1
            called.update(tool_call.name for tool_call in tool_calls_of(call, call.response))
        failed.update(str(signal.tool) for signal in find_signals(episode) if signal.kind is SignalKind.TOOL_FAILED)
    return DevReport(
        rollouts=len(episodes),
        outcomes=dict(outcomes),
        messages=dict(messages.most_common()),
        calls=sum(len(episode.calls) for episode in episodes),
        roles=dict(roles),
        prompts=dict(prompts),
        tools=dict(called),
        tools_failed=dict(failed),
        rewards=tuple(reward for of_task in rewards.values() for reward in of_task),
        reward_error=estimated.error if (estimated := estimate(rewards)) is not None else None,
        failures=failures,
        failure_reward=config.rollout.failure_reward,
        trained=len(set().union(*(one.rollouts for one in used.values()))),
        calls_trained=len(trained),
        tokens_trained=sum(len(call.chosen) for call in trained),
        groups=len(members),
        groups_flat=len(set.intersection(*(one.flat for one in used.values()))),
        position_bias=next(
            (bias for name, one in used.items() if (bias := _position_bias(one.groups, algorithms[name]))), None
        ),
        left_out=dict(left_out),
        folder=folder,
        run=folder.name,
    )


class _UsedRollouts(Struct, frozen=True):
    """What training a policy would use of some groups."""

    groups: list[list[SelectedRollout]]
    flat: set[str]
    rollouts: set[tuple[str, str]]
    """By group and id."""
    calls: list[Call]
    accounting: StepAccounting


def _used(members: Iterable[Sequence[Episode]], algorithm: Algorithm) -> _UsedRollouts:
    accounting = StepAccounting()
    sample_filter = replace(algorithm.sample_filter, min_group=1)  # a report needs no complete groups
    groups = [found for each in members if (found := select_rollouts(each, sample_filter, accounting))]
    used = _UsedRollouts(groups, _flat_groups(groups, algorithm), set(), [], accounting)
    in_flat = 0
    for rollout in (rollout for group in groups for rollout in group):
        calls = [transition.call for _, transition in rollout.transitions]
        if rollout.episode.rollout.group in used.flat:
            in_flat += bool(calls)
        elif calls:
            used.rollouts.add((rollout.episode.rollout.group, rollout.episode.rollout.id))
            used.calls.extend(calls)
    if in_flat:
        accounting.excluded["in a flat group"] = in_flat
    return used


def _flat_groups(groups: Sequence[Sequence[SelectedRollout]], algorithm: Algorithm) -> set[str]:
    """Return the groups of several rollouts in which no call has an advantage, if training would leave them out."""
    if algorithm.trains_every_call or algorithm.kl_penalty or algorithm.signals.enabled:
        return set()
    compared = [group for group in groups if len(group) > 1]
    samples = make_samples(compared)
    estimated = compute_advantages(compared, samples, StepInputs(), algorithm.advantage_estimator, StepAccounting())
    group_R = [rollout.episode.rollout.group for group in compared for rollout in group]
    return set(group_R) - {group_R[sample.rollout] for sample in estimated if sample.advantage}


def _position_bias(groups: Sequence[Sequence[SelectedRollout]], algorithm: Algorithm) -> str | None:
    """Return that advantages depend on the position of calls, if no model is needed to compute them."""
    if algorithm.critic or algorithm.kl_penalty:
        return None
    rewarded = [[_with_signals(rollout, algorithm.signals) for rollout in group] for group in groups]
    accounting = StepAccounting()
    compute_advantages(rewarded, make_samples(rewarded), StepInputs(), algorithm.advantage_estimator, accounting)
    return PositionDetector(algorithm.position_advice).add_step(accounting.advantages)


def _with_signals(rollout: SelectedRollout, rules: SignalRules) -> SelectedRollout:
    """Return a rollout with the automatic rewards of the first step."""
    episode = rollout.episode
    return replace(rollout, episode=replace(episode, rewards=(*episode.rewards, *automatic(episode, rules, 1))))
