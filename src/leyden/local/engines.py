"""Runs the engines of a run: LoRA adapters over one base in one vLLM server, and an engine for each other policy."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch

from leyden.config import ConfigError
from leyden.engine.protocol import EngineBackend
from leyden.learner.loading import model_device
from leyden.local.engine import (
    choose_engine,
    count_slots,
    engine_places,
    engine_processes,
    running_engine,
    samples_in_own_process,
)
from leyden.local.memory_plan import MemoryPlan, PlannedPolicy, plan_memory, plan_training
from leyden.local.notes import print_note
from leyden.local.placement import TRAINER_DEVICE
from leyden.local.policies import LocalPolicy
from leyden.process.place import FindPlace
from leyden.runs.checkpoint_files import checkpoint_folder


@asynccontextmanager
async def running_engines(
    folder: Path, policies: Sequence[LocalPolicy], elsewhere: Sequence[FindPlace] = ()
) -> AsyncIterator[dict[str, EngineBackend]]:
    """Run what serves each policy, by its name, within this context; `folder` is the run's.

    Replicas run on this machine, or `elsewhere`. Raises `ConfigError` before anything starts if they do not fit.
    """
    groups = engine_groups(policies)
    if groups[0][0].config.engine.url is not None and len(groups) > 1:
        raise ConfigError(
            f"`engine.url` is one vLLM, and `policies` take {len(groups)}: leave it out, or name one `model` for all "
            "of them and set `training.lora`"
        )
    plan = None if elsewhere else plan_engines(groups)
    own_process = samples_in_own_process(policies, model_device(policies[0].model))
    async with AsyncExitStack() as opened:
        engines: dict[str, EngineBackend] = {}
        for number, group in enumerate(groups):
            logs = folder if len(groups) == 1 else checkpoint_folder(folder, group[0].name)
            logs.mkdir(parents=True, exist_ok=True)
            engine = running_engine(logs, group, plan, number, len(groups), elsewhere, own_process)
            engines |= await opened.enter_async_context(engine)
        yield engines


def engine_groups(policies: Sequence[LocalPolicy]) -> list[list[LocalPolicy]]:
    """Return the policies of each engine: vLLM serves adapters over the same base together."""
    groups: dict[object, list[LocalPolicy]] = {}
    for one in policies:
        kind, _ = choose_engine(one.config, model_device(one.model))
        adapter = one.adapter if one.policy is None else one.policy.adapter
        shared = kind == "vllm" and adapter is not None
        groups.setdefault(one.source.folder if shared else one.name, []).append(one)
    return list(groups.values())


def plan_engines(groups: Sequence[Sequence[LocalPolicy]]) -> MemoryPlan | None:
    """Divide the memory of the GPU that trains, and print how; None if there is none, or no engine on it."""
    config = groups[0][0].config
    device = model_device(groups[0][0].model)
    if device.type != "cuda":
        return None
    planned = [[_planned(one) for one in group] for group in groups]
    trained = [one for group in planned for one in group if one.training]
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    beside = any(TRAINER_DEVICE in place for place in engine_places(config, device))
    if beside and config.engine.url is None:
        kind, _ = choose_engine(config, device)
        slots = count_slots(config, kind, device) if kind == "torch" else None
        processes = None if slots is None else engine_processes(groups, slots)
        plan = plan_memory(planned, total, others, slots, processes)
        print_note(str(plan))
        return plan
    if trained:
        print_note(str(plan_training(trained, total, others)))
    return None


def _planned(one: LocalPolicy) -> PlannedPolicy:
    policy = one.policy
    if policy is None:
        return PlannedPolicy(one.config, one.model, shares_base=one.adapter is not None)
    return PlannedPolicy(one.config, one.model, True, policy.has_reference, policy.shares_base)
