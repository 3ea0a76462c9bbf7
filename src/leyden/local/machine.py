"""Defaults that follow from this machine, for what the configuration leaves open: how large a worker is."""

from leyden import defaults
from leyden.config import Config

_OTHER_CORES = 4
"""Cores that trainer, server and engine keep busy while agents run."""
_MAX_PROCESSES = 16
"""More host processes than this gain little: agents mostly wait for the model."""
_GPU_CONCURRENCY = 256


def worker_size(config: Config, cores: int, on_gpu: bool = False) -> tuple[int, int]:
    """Return how many processes a worker runs agents in, and how many rollouts at the same time over all of them."""
    if config.deterministic:
        return 1, 1
    processes, concurrency = config.workers.processes or 0, config.workers.concurrency
    if concurrency is None:
        concurrency = max(processes, _GPU_CONCURRENCY if on_gpu else defaults.CONCURRENCY)
    by_cores = max(defaults.WORKER_PROCESSES, min(_MAX_PROCESSES, concurrency, cores - _OTHER_CORES))
    return processes or by_cores, concurrency
