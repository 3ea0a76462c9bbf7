"""The agent of benchmarks/chaos.py: takes a moment and returns its reward."""

import time


def act(task: dict[str, float]) -> float:
    """Sleep as long as the task says."""
    time.sleep(task["s"])
    return 1.0
