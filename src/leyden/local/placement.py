"""Decides which CUDA devices each replica of the engine has."""

import os
from collections.abc import Sequence
from typing import Any

from leyden.config import Config, ConfigError

TRAINER_DEVICE = 0
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def place_replicas(config: Config, devices: int) -> list[tuple[int, ...]]:
    """Return the devices of each replica, on a machine with so many; none without CUDA.

    Raises `ConfigError` if there are too few.
    """
    engine, trainer_devices = config.engine, config.training.devices
    if not devices:
        return [()] * engine.replicas
    needed = engine.replicas * engine.tensor_parallel
    first = TRAINER_DEVICE if needed == trainer_devices == 1 else trainer_devices
    chosen = engine.devices or range(first, first + needed)
    if max(chosen) >= devices:
        wanted = f"{engine.replicas} replicas of {engine.tensor_parallel} devices"
        raise ConfigError(
            f"`engine.replicas`: {wanted} would have devices {', '.join(map(str, chosen))}, and there are {devices}, "
            f"from 0 on: lower it, or name devices in `engine.devices`, which replicas may share"
        )
    width = engine.tensor_parallel
    return [tuple(chosen[start : start + width]) for start in range(0, needed, width)]


def check_tensor_parallel(size: int, model: Any) -> None:
    """Refuse to divide a model whose attention heads cannot be divided; `model` is its text configuration."""
    heads = model.num_attention_heads
    kv_heads = getattr(model, "num_key_value_heads", None) or heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"`engine.tensor_parallel` is {size}, and the model has {heads} attention heads with {kv_heads} for keys "
            "and values: set it to a number that divides both"
        )


def device_variable(devices: Sequence[int]) -> dict[str, str]:
    """Return the environment variable that hides all other devices from a process; the numbers are this process's."""
    if not devices:
        return {}
    visible = [name for name in os.environ.get(_VARIABLE, "").split(",") if name]
    return {_VARIABLE: ",".join(visible[device] if visible else str(device) for device in devices)}
