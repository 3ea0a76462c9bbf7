"""Chooses the learning rate of each policy that does not set one; a run that is resumed keeps what it chose."""

from msgspec.structs import replace

from leyden.config import Config, policy_configs, trained_policies
from leyden.learner.learning_rate import default_learning_rate
from leyden.learner.loading import count_parameters
from leyden.models.source import find_model
from leyden.runs.run_folder import RunFolder, stored_config


def with_learning_rates(config: Config, folder: RunFolder) -> tuple[Config, list[str]]:
    """Return the configuration with a learning rate for each policy that is trained, and a sentence about each."""
    if not config.policies:
        rate, why = _choose(config, folder)
        return replace(config, training=replace(config.training, learning_rate=rate)), [f"learning rate {why}"]
    own, policies, notes = policy_configs(config), dict(config.policies), list[str]()
    for name in trained_policies(config):
        rate, why = _choose(own[name], folder)
        policies[name] = replace(policies[name], learning_rate=rate)
        notes.append(f"learning rate of {name} {why}")
    return replace(config, policies=policies), notes


def _choose(config: Config, folder: RunFolder) -> tuple[float, str]:
    """Return the learning rate of a policy, whose configuration this is, and what to say of it.

    If it is not set, the run in this folder keeps its rate once it has trained a step; before, it is the default.
    """
    training = config.training
    rate, why = training.learning_rate, "as configured"
    if rate is None and folder.has_trained():
        before = policy_configs(stored_config(folder.path))
        rate, why = before[config.policy].training.learning_rate, "with which the run began"
    if rate is None:
        count = count_parameters(find_model(config.model, config.base))
        rate = default_learning_rate(count, training.lora is not None)
        adapters = "adapters of " if training.lora is not None else ""
        why = f"the default for {adapters}{count / 1e6:,.0f} million parameters (`training.learning_rate` sets it)"
    return rate, f"{rate:.2g}, {why}"
