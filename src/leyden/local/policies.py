"""The policies of a run on this machine, and their models."""

from collections.abc import Callable, Sequence

from msgspec import Struct
from transformers import PreTrainedModel

from leyden.config import Config, policy_configs
from leyden.engine.protocol import EngineBackend, LoraWeights
from leyden.learner.loading import check_tokenizer, load_model
from leyden.learner.policy import Policy
from leyden.learner.ranks.gathered import GatheredWeights
from leyden.models.source import ModelSource, find_model
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
    adapter: Callable[[], LoraWeights] | None = None
    """Its LoRA adapter over the model of another policy, if that is all that it has."""
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


def load_policy(config: Config, runs: Sequence[str] | None = None) -> LocalPolicy:
    """Load a policy that is not trained, whose configuration this is; `runs` may have been meant by its model."""
    source = find_model(config.model, config.base, runs)
    check_tokenizer(source)
    return LocalPolicy(config, source, load_model(source, config.engine.dtype))


def load_policies(config: Config, runs: Sequence[str] | None = None) -> list[LocalPolicy]:
    """Load all policies of a run that is not trained."""
    return [load_policy(own, runs) for own in policy_configs(config).values()]


def served_policy(policy: LocalPolicy, engine: EngineBackend) -> ServedPolicy:
    """Return what a server process must know of a policy."""
    return ServedPolicy(policy.name, str(policy.source.folder), policy.source.name, engine.address)
