"""Loads the policies of a run and opens their learner: in this process, or on several devices with a process each."""

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from msgspec import Struct
from msgspec.structs import replace

from leyden.config import Config, ConfigError, policy_configs
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.earlier import EarlierAdapter, EarlierModel, EarlierPolicy
from leyden.learner.loading import compute_dtype, device, empty_model, load_model, read_model_config, refuse_experts
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.memory import check_memory
from leyden.learner.objective import objective_of
from leyden.learner.policy import Policy
from leyden.learner.protocol import Learner, TrainerState
from leyden.learner.ranks.launch import launch_of
from leyden.learner.ranks.learner import RankedLearner
from leyden.learner.ranks.messages import RankSetup
from leyden.learner.ranks.processes import RankPlaces, RankProcesses
from leyden.local.engine import choose_engine
from leyden.local.memory_plan import PlannedPolicy, plan_training
from leyden.local.notes import print_note
from leyden.local.policies import LocalPolicy, load_policy
from leyden.models.source import ModelSource, find_model
from leyden.orchestrator.algorithm.resolve import Algorithm
from leyden.runs.checkpoint_files import drop_unfinished_steps


class OpenedLearner(Struct, frozen=True):
    """A learner, the states that it was restored to, and all policies that are served."""

    learner: Learner
    states: dict[str, TrainerState]
    """By policy, of those that are trained."""
    policies: Sequence[LocalPolicy]
    parts: Sequence[RankProcesses] = ()
    """What must not fail."""


async def open_learner(
    opened: AsyncExitStack,
    config: Config,
    algorithms: Mapping[str, Algorithm],
    run: Path,
    elsewhere: RankPlaces | None = None,
) -> OpenedLearner:
    """Open the learner of a run in a folder, restored from the newest checkpoint; `algorithms` are by policy.

    With places `elsewhere`, one device is a rank as well.
    """
    if config.training.devices > 1 or elsewhere is not None:
        return await _open_ranks(opened, config, algorithms, run, elsewhere)
    drop_unfinished_steps(run, list(algorithms), print_note)
    loaded: list[LocalPolicy] = []
    trained: dict[str, TrainedPolicy] = {}
    earlier = {name: one.of for name, one in config.policies.items() if one.of is not None}
    configs = policy_configs(config)
    for name, own in configs.items():
        if name in earlier:
            continue
        if name not in algorithms:
            loaded.append(load_policy(own))
            continue
        algorithm, source = algorithms[name], find_model(own.model, own.base)
        torch.manual_seed(own.seed)  # LoRA matrices and a critic begin at random
        model = load_model(source, own.engine.dtype, own.training, algorithm.reference)
        alike = [one.policy for one in loaded if one.source == source and one.policy is not None and one.policy.adapter]
        beside = alike[0] if alike else None
        policy = Policy(model, own.training, algorithm.critic, algorithm.reference, beside=beside)
        _note_rows(source, policy.no_trees_reason)
        loaded.append(LocalPolicy(own, source, model, policy=policy))
        trained[name] = TrainedPolicy(policy, objective_of(own), _checkpoints(own, source, run))
    opponents: dict[str, EarlierPolicy] = {}
    for name, of in earlier.items():
        player = next(one for one in loaded if one.name == of)
        opponent, opponents[name] = _earlier(configs[name], player, trained[of])
        loaded.append(opponent)
    learner = opened.enter_context(LocalLearner(trained, opponents))
    states = {name: await learner.restore(name) for name in trained}
    versions = {name: state.version for name, state in states.items()}
    served = [replace(one, version=versions.get(one.name, 0)) for one in loaded]
    return OpenedLearner(learner, states, served)


def _earlier(config: Config, player: LocalPolicy, trained: TrainedPolicy) -> tuple[LocalPolicy, EarlierPolicy]:
    """Return a policy that plays earlier versions of another: an adapter over its base if vLLM serves that."""
    kind, _ = choose_engine(config, device())
    if kind == "vllm" and trained.policy.adapter is not None:
        adapter = EarlierAdapter(trained.policy.adapter, trained.checkpoints)
        return LocalPolicy(config, player.source, player.model, adapter=adapter.adapter), adapter
    loaded = load_policy(config)
    return loaded, EarlierModel(loaded.model, trained.checkpoints)


def _checkpoints(config: Config, source: ModelSource, run: Path) -> Checkpoints:
    return Checkpoints(run, config.policy, source, config.checkpoints, print_note)


async def _open_ranks(
    opened: AsyncExitStack, config: Config, algorithms: Mapping[str, Algorithm], run: Path, elsewhere: RankPlaces | None
) -> OpenedLearner:
    algorithm, source = algorithms[config.policy], find_model(config.model, config.base)
    devices, dtype = config.training.devices, compute_dtype(config.engine.dtype)
    _check_adapters(config, dtype)
    model = empty_model(read_model_config(source.folder), getattr(torch, dtype))
    refuse_experts(source.name, model.config)
    if elsewhere is None:
        if torch.cuda.is_available():
            check_devices(devices, torch.cuda.device_count())
            free, total = min(torch.cuda.mem_get_info(number) for number in range(devices))
            plan = plan_training([PlannedPolicy(config, model, True, algorithm.reference)], total, total - free)
            print_note(f"{plan} on each device that trains")
        check_memory(source.name, model, dtype, config.training, algorithm.reference, device())
    ranks = await opened.enter_async_context(_ranks(config, run, elsewhere))
    setup = RankSetup(config, source, dtype, algorithm.critic, algorithm.reference)
    learner = RankedLearner(ranks, setup, _checkpoints(config, source, run))
    where = "" if elsewhere is None else " of the cluster"
    print_note(f"training on {devices} devices{where}, with a process each ({run / 'rank-0.log'})")
    _note_rows(source, await learner.start())
    state = await learner.restore(config.policy)
    weights = learner.weights(config.policy)
    served = LocalPolicy(config, source, model, state.version, weights=weights)
    return OpenedLearner(learner, {config.policy: state}, [served], parts=(ranks,))


def _ranks(config: Config, run: Path, elsewhere: RankPlaces | None) -> RankProcesses:
    devices, timeout_s, launch = config.training.devices, config.training.device_timeout_s, launch_of(os.environ)
    if launch is not None and elsewhere is not None:
        raise ConfigError("--ray starts the ranks, and so does `torchrun`: leave out one of them")
    return RankProcesses(devices, run, timeout_s, launch, elsewhere)


def check_devices(wanted: int, available: int) -> None:
    """Refuse to train on so many GPUs that the engine would have none."""
    if available <= wanted:
        least = f"lower it to {available - 1}" if available > 2 else "leave it out"
        raise ConfigError(
            f"`training.devices` is {wanted}, the engine needs another GPU, and there are {available}: {least}"
        )


def _check_adapters(config: Config, dtype: str) -> None:
    """Refuse LoRA if the engine would sample from other weights than the trained ones."""
    kind, _ = choose_engine(config, device())
    if config.training.lora is not None and kind == "torch" and dtype == "bfloat16":
        raise ConfigError(
            "`training.lora` on several devices computes adapters beside the weights, and the embedded engine merges "
            'them, which in bfloat16 is not the same: set `engine.kind = "vllm"` or `engine.dtype = "float32"`'
        )


def _note_rows(source: ModelSource, reason: str | None) -> None:
    if reason is not None:
        print_note(f"{source.name} cannot be trained as a tree, so every call is computed by itself: {reason}")
