"""What a checkpoint holds of a policy besides the weights of the model: LoRA matrices, a critic, the optimiser."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from leyden.learner.policy import Policy
from leyden.learner.sharded_files import BESIDE, MOMENTS, stored_names

BESIDE_FILE, MOMENTS_FILE = "beside.safetensors", "optimiser.safetensors"
"""Of a checkpoint that is not sharded."""
MOMENT_KEYS = ("exp_avg", "exp_avg_sq", "step")


def read_moments(folder: Path) -> dict[str, Tensor]:
    """Read the optimiser's moments, and the state of the random numbers, of a checkpoint that is not sharded."""
    return load_file(folder / MOMENTS_FILE)


def read_beside(folder: Path) -> dict[str, Tensor]:
    """Read the LoRA matrices and the critic of a checkpoint that is not sharded."""
    return load_file(folder / BESIDE_FILE)


def moments_of(policy: Policy) -> dict[str, Tensor]:
    """Return the moments and step counts of the optimiser."""
    states = {name: policy.optimiser.state.get(parameter, {}) for name, parameter in policy.parameters.items()}
    return {f"{name}.{key}": value for name, state in states.items() for key, value in state.items()}


def beside_and_moments(policy: Policy, moments: bool = True) -> dict[str, Tensor]:
    """Return them by their names in a sharded checkpoint, with or without the moments of the optimiser."""
    beside = {f"{BESIDE}{name}": each.detach() for name, each in policy.extra_parameters.items()}
    own = moments_of(policy) if moments else {}
    return beside | {f"{MOMENTS}{name}": value for name, value in own.items()}


def make_moments(policy: Policy, folder: Path) -> None:
    """Give the optimiser room for the moments that a sharded checkpoint has, to be read."""
    stored = stored_names(folder)
    policy.optimiser.state.clear()
    for name, parameter in policy.parameters.items():
        if f"{MOMENTS}{name}.step" in stored:
            step = torch.zeros((), device=parameter.device if parameter.device.type == "cuda" else "cpu")
            moments = (torch.zeros_like(parameter).detach() for _ in range(2))
            policy.optimiser.state[parameter] = dict(zip(MOMENT_KEYS, (*moments, step), strict=True))
