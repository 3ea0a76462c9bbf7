"""Chooses the learning rate of a run whose configuration leaves it open, and says which one is used."""

from msgspec.structs import replace

from leyden.config import Config
from leyden.learner.default_learning_rate import default_learning_rate
from leyden.learner.loading import count_parameters
from leyden.models.source import ModelSource
from leyden.runs.run_folder import RunFolder, stored_config


def with_learning_rate(config: Config, folder: RunFolder, source: ModelSource) -> tuple[Config, str]:
    """Return the configuration with a learning rate, and a sentence about it.

    Unset, it is that of the run in this folder if it has trained a step, and otherwise the default for the model.
    """
    training = config.training
    rate, why = training.learning_rate, "as configured"
    if rate is None and folder.has_trained():
        rate, why = stored_config(folder.path).training.learning_rate, "with which the run began"
    elif rate is None:
        count = count_parameters(source)
        rate = default_learning_rate(count, training.lora is not None)
        adapters = "adapters of " if training.lora is not None else ""
        why = f"the default for {adapters}{count / 1e6:,.0f} million parameters (`training.learning_rate` sets it)"
    return replace(config, training=replace(training, learning_rate=rate)), f"learning rate {rate:.2g}, {why}"
