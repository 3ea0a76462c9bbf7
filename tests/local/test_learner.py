"""A learner on several devices is refused before anything is started if it cannot work."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from leyden.config import Config, ConfigError, read_config
from leyden.local.learner import check_devices, open_learner
from leyden.orchestrator.algorithm.resolve import algorithms_of


def test_the_engine_has_a_gpu_of_its_own() -> None:
    check_devices(3, 4)
    with pytest.raises(ConfigError, match=r"`training.devices` is 4, the engine needs another GPU.*: lower it to 3"):
        check_devices(4, 4)
    with pytest.raises(ConfigError, match="there are 2: leave it out"):
        check_devices(2, 2)


async def test_adapters_that_the_embedded_engine_would_round_are_refused(tmp_path: Path) -> None:
    config: Config = read_config(
        {
            "run": "r",
            "agent": "a:b",
            "tasks": "t",
            "training": {"devices": 2, "lora": {}},
            "engine": {"kind": "torch", "dtype": "bfloat16"},
        }
    )
    async with AsyncExitStack() as opened:
        with pytest.raises(ConfigError, match=r'`training.lora`.*set `engine.kind = "vllm"` or `engine.dtype'):
            await open_learner(opened, config, algorithms_of(config), tmp_path)
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240
