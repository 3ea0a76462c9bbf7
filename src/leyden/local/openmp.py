"""How torch's threads wait for each other."""

import os


def wait_asleep() -> None:
    """Have OpenMP's threads sleep while they wait, unless the user says otherwise. Call it before torch is imported.

    By default they spin: on cores that agents, engine and trainer share, a thread that spins keeps the core from the
    thread that it waits for.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
