"""Sets how many threads torch computes with, and how they wait for each other."""

import os

from leyden.process.cores import assigned_cores, usable_cores


def configure_openmp() -> None:
    """Set OMP_WAIT_POLICY, and in a container with a quota OMP_NUM_THREADS, unless they are set.

    Call it before torch is imported. By default threads spin while they wait: on cores that agents, engine and trainer
    share, a spinning thread takes the core from the thread that it waits for. And there is one thread for each core
    of the machine, whatever the quota: more threads than cores make small operations many times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (cores := usable_cores()) < assigned_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
