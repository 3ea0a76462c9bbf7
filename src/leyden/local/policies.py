"""The policies of a run on this machine: their models, and the engines that serve them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from msgspec import Struct
from transformers import PreTrainedModel

from leyden.config import Config, ConfigError, policy_configs
from leyden.engine.protocol import EngineBackend
from leyden.learner.loading import check_tokenizer, load_model, model_device
from leyden.learner.policy import Policy
from leyden.learner.ranks.learner import GatheredWeights
from leyden.local.engine import running_engine
from leyden.models.source import ModelSource, find_model
from leyden.runs.checkpoint_files import checkpoint_folder
from leyden.server.options import ServedPolicy


class LocalPolicy(Struct, frozen=True):
    """A policy whose model is loaded."""

    config: Config
    """That of a run with this policy alone."""
    source: ModelSource
    model: PreTrainedModel
    version: int = 0
    policy: Policy | None = None
    """What trains it in this process."""
    weights: GatheredWeights | None = None
    """Those of a policy that is trained in other processes; `model` then has no values."""

    @property
    def is_trained(self) -> bool:
        """Whether it learns."""
        return self.policy is not None or self.weights is not None

    @property
    def name(self) -> str:
        """The name of the policy."""
        return self.config.policy


def load_policy(config: Config, runs: Sequence[str] = ()) -> LocalPolicy:
    """Load a policy that is not trained, whose configuration this is; `runs` may have been meant by its model."""
    source = find_model(config.model, config.base, runs)
    check_tokenizer(source)
    return LocalPolicy(config, source, load_model(source, config.engine.dtype, training=False))


def load_policies(config: Config, runs: Sequence[str] = ()) -> list[LocalPolicy]:
    """Load all policies of a run that is not trained."""
    return [load_policy(own, runs) for own in policy_configs(config).values()]


@asynccontextmanager
async def running_engines(folder: Path, policies: Sequence[LocalPolicy]) -> AsyncIterator[dict[str, EngineBackend]]:
    """Run an engine for each policy, by its name, within this context; `folder` is the run's."""
    _check_memory(policies)
    async with AsyncExitStack() as opened:
        engines: dict[str, EngineBackend] = {}
        for one in policies:
            logs = folder if len(policies) == 1 else checkpoint_folder(folder, one.name)
            logs.mkdir(parents=True, exist_ok=True)
            engine = running_engine(one.config, logs, one.model, one.source, one.version, one.policy, one.weights)
            engines[one.name] = await opened.enter_async_context(engine)
        yield engines


def _check_memory(policies: Sequence[LocalPolicy]) -> None:
    """Refuse several models on a GPU: the plan of its memory is for one model and one engine."""
    if len(policies) > 1 and model_device(policies[0].model).type == "cuda":
        raise ConfigError(
            f"`policies`: {len(policies)} models with an engine each are not divided over the memory of a GPU yet: "
            "train one at a time, or on a CPU (CUDA_VISIBLE_DEVICES= hides the GPU)"
        )


def served_policy(policy: LocalPolicy, engine: EngineBackend) -> ServedPolicy:
    """Return what a server process must know of a policy."""
    return ServedPolicy(policy.name, str(policy.source.folder), policy.source.name, engine.address)
