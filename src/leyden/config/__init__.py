"""What a user writes, in TOML, on the command line or as arguments of `leyden.train`: the same keys in all three.

Needs no torch and knows nobody. A configuration that was read is whole and sound by itself; whether what it names
(files, a model, an agent) exists is found out before any work starts, by whoever uses it.
"""

from leyden.config.reading import ConfigError, override, read_config, read_file, written
from leyden.config.schema import (
    AdapterConfig,
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    EngineConfig,
    EvaluationConfig,
    RolloutConfig,
    SamplingConfig,
    ServerConfig,
    ServiceConfig,
    SignalsConfig,
    TrainingConfig,
    WorkerConfig,
)

__all__ = [
    "AdapterConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "EngineConfig",
    "EvaluationConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
    "ServiceConfig",
    "SignalsConfig",
    "TrainingConfig",
    "WorkerConfig",
    "override",
    "read_config",
    "read_file",
    "written",
]
