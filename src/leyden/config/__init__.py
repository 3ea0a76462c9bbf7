"""The configuration of a run: the same keys in TOML, on the command line and as arguments of `leyden.train`.

Imports neither torch nor another package. A `Config` is complete and valid by itself; whether the files, the model and
the agent that it names exist is checked by the code that uses them, before any work starts.
"""

from leyden.config.policies import policy_configs, trained_policies
from leyden.config.reading import ConfigError, document_to_toml, flattened, override, read_config, read_file, to_toml
from leyden.config.schema import (
    AdapterConfig,
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    EngineConfig,
    Hyperparameters,
    PolicyConfig,
    TrainingConfig,
)

__all__ = [
    "AdapterConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "EngineConfig",
    "Hyperparameters",
    "PolicyConfig",
    "TrainingConfig",
    "document_to_toml",
    "flattened",
    "override",
    "policy_configs",
    "read_config",
    "read_file",
    "to_toml",
    "trained_policies",
]
