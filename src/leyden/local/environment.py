"""Describes the machine and the packages that a run uses, for its report."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from leyden import __version__
from leyden.process.resources import usable_cores

_PACKAGES = ("torch", "transformers", "tokenizers", "renderers", "peft", "vllm", "openai", "anthropic", "sqlalchemy")


def describe_environment() -> dict[str, str]:
    """Return names and values for people to read."""
    found = {
        "leyden": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": f"{usable_cores()} of {os.cpu_count()}",
    }
    for number in range(torch.cuda.device_count()):
        found[f"gpu {number}"] = torch.cuda.get_device_name(number)
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
