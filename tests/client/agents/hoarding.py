"""An agent that takes as much memory as its task says and returns the limits of its process."""

import mmap
import resource
import time
from typing import Any

import leyden


def act(task: dict[str, Any]) -> leyden.Result:
    if "shared_mb" in task:
        shared = mmap.mmap(-1, task["shared_mb"] << 20)
        for _ in range(task["shared_mb"]):
            shared.write(bytes(1 << 20))
        time.sleep(600)
    hoard = bytearray(task["mb"] << 20)
    limits = {
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[1],
        "memory_mb": resource.getrlimit(resource.RLIMIT_DATA)[1] >> 20,
    }
    return leyden.Result({"took": len(hoard) >> 20, **limits}, reward=1.0)
