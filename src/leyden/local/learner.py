"""Loads the policy of a run and opens its learner: in this process, or on several devices with a process each."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch
from msgspec import Struct
from transformers import PreTrainedModel

from leyden.config import Config, ConfigError
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.loading import compute_dtype, device, empty_model, load_model, read_model_config
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.objective import Objective
from leyden.learner.policy import Policy
from leyden.learner.protocol import Learner, TrainerState
from leyden.learner.ranks.learner import GatheredWeights, RankedLearner
from leyden.learner.ranks.messages import RankSetup
from leyden.learner.ranks.processes import RankProcesses
from leyden.local.engine import choose_engine
from leyden.local.notes import print_note
from leyden.models.source import ModelSource
from leyden.orchestrator.algorithm.resolve import Algorithm


class OpenedLearner(Struct, frozen=True):
    """A learner, the state that it was restored to, and the model that is served."""

    learner: Learner
    state: TrainerState
    model: PreTrainedModel
    policy: Policy | None = None
    """What is trained in this process."""
    weights: GatheredWeights | None = None
    """Those of a policy that is trained in other processes; `model` then has no values."""
    parts: Sequence[RankProcesses] = ()
    """What must not fail."""


async def open_learner(
    opened: AsyncExitStack, config: Config, algorithm: Algorithm, objective: Objective, source: ModelSource, run: Path
) -> OpenedLearner:
    """Open the learner of a run in a folder, restored from the newest checkpoint."""
    checkpoints = Checkpoints(run, config.policy, source, config.checkpoints, print_note)
    if config.training.devices > 1:
        return await _open_ranks(opened, config, algorithm, source, checkpoints, run)
    torch.manual_seed(config.seed)  # LoRA matrices and a critic begin at random
    model = load_model(source, config.engine.dtype, True, config.training.lora, algorithm.reference)
    policy = Policy(model, config.training, algorithm.critic, algorithm.reference)
    _note_rows(source, policy.no_trees_reason)
    trained = TrainedPolicy(policy, objective, checkpoints)
    learner = opened.enter_context(LocalLearner({config.policy: trained}))
    return OpenedLearner(learner, await learner.restore(config.policy), model, policy)


async def _open_ranks(
    opened: AsyncExitStack,
    config: Config,
    algorithm: Algorithm,
    source: ModelSource,
    checkpoints: Checkpoints,
    run: Path,
) -> OpenedLearner:
    devices, dtype = config.training.devices, compute_dtype(config.engine.dtype)
    _check_adapters(config, dtype)
    if torch.cuda.is_available():
        check_devices(devices, torch.cuda.device_count())
    ranks = await opened.enter_async_context(RankProcesses(devices, run, config.training.device_timeout_s))
    setup = RankSetup(config, source, dtype, algorithm.critic, algorithm.reference)
    learner = RankedLearner(ranks, setup, checkpoints)
    print_note(f"training on {devices} devices, with a process each ({run / 'rank-0.log'})")
    _note_rows(source, await learner.start())
    state = await learner.restore(config.policy)
    model = empty_model(read_model_config(source.folder), getattr(torch, dtype))
    return OpenedLearner(learner, state, model, weights=learner.weights(config.policy), parts=(ranks,))


def check_devices(wanted: int, available: int) -> None:
    """Refuse to train on so many GPUs that the engine would have none."""
    if available <= wanted:
        least = f"lower it to {available - 1}" if available > 2 else "leave it out"
        raise ConfigError(
            f"`training.devices` is {wanted}, the engine needs another GPU, and there are {available}: {least}"
        )


def _check_adapters(config: Config, dtype: str) -> None:
    """Refuse LoRA with an engine that would sample from other weights than those that are trained."""
    kind, _ = choose_engine(config, device())
    if config.training.lora is not None and kind == "torch" and dtype == "bfloat16":
        raise ConfigError(
            "`training.lora` on several devices computes adapters beside the weights, and the embedded engine merges "
            'them, which in bfloat16 is not the same: set `engine.kind = "vllm"` or `engine.dtype = "float32"`'
        )


def _note_rows(source: ModelSource, reason: str | None) -> None:
    if reason is not None:
        print_note(f"{source.name} cannot be trained as a tree, so every call is computed by itself: {reason}")
