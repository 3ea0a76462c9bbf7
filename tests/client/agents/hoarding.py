"""An agent that takes as much memory as its task says and returns the limits of its process."""

import resource
from typing import Any

import leyden


def act(task: dict[str, Any]) -> leyden.Result:
    hoard = bytearray(task["mb"] << 20)
    limits = {
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[1],
        "memory_mb": resource.getrlimit(resource.RLIMIT_DATA)[1] >> 20,
    }
    return leyden.Result({"took": len(hoard) >> 20, **limits}, reward=1.0)
