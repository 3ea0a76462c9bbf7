"""What the configuration leaves open follows from the machine."""

import pytest

from leyden.config import Config
from leyden.config.schema import WorkerConfig
from leyden.local.machine import worker_size


def config(deterministic: bool = False, **workers: int) -> Config:
    return Config(run="r", agent="a", tasks="t", deterministic=deterministic, workers=WorkerConfig(**workers))


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (6, 2), (16, 12), (128, 16)])
def test_agents_leave_cores_to_trainer_server_and_engine(cores: int, processes: int) -> None:
    assert worker_size(config(), cores) == (processes, 64)
    assert worker_size(config(), cores, on_gpu=True) == (processes, 256)


def test_what_is_configured_is_kept() -> None:
    assert worker_size(config(processes=3, concurrency=9), 16, on_gpu=True) == (3, 9)
    assert worker_size(config(concurrency=2), 16) == (2, 2)
    assert worker_size(config(processes=100), 16) == (100, 100)
    assert worker_size(config(deterministic=True), 16) == (1, 1)
    assert worker_size(config(deterministic=True, processes=3), 16) == (1, 1)
