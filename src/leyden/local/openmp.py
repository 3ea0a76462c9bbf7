"""Sets how torch's threads wait for each other."""

import os


def set_wait_policy() -> None:
    """Make OpenMP's threads sleep while they wait, unless OMP_WAIT_POLICY is set. Call it before torch is imported.

    By default they spin. On cores that agents, engine and trainer share, a spinning thread takes the core from the
    thread that it waits for.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
