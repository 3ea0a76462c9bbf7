"""Every replica has its devices, or the run is refused with what to change."""

import pytest
from transformers import LlamaConfig

from leyden.config import Config, ConfigError, read_config
from leyden.local.placement import check_tensor_parallel, device_variable, place_replicas


def config(devices_that_train: int = 1, **engine: object) -> Config:
    training = {"devices": devices_that_train}
    return read_config({"run": "r", "agent": "a.py:f", "tasks": "t.jsonl", "engine": engine, "training": training})


def test_replicas_have_the_devices_after_the_trainers() -> None:
    assert place_replicas(config(), 8) == [(0,)]
    assert place_replicas(config(2), 8) == place_replicas(config(2, devices=[2]), 8) == [(2,)]
    assert place_replicas(config(replicas=3, tensor_parallel=2), 8) == [(1, 2), (3, 4), (5, 6)]
    assert place_replicas(config(replicas=2, devices=[0, 0]), 1) == [(0,), (0,)]
    assert place_replicas(config(replicas=2), 0) == [(), ()]


def test_devices_that_train_together_have_no_engine() -> None:
    assert config(1, devices=[0]).engine.devices == (0,)
    with pytest.raises(ConfigError, match="devices 0 to 1 train, and have no memory for an engine: name others"):
        config(2, replicas=2, devices=[1, 2])


@pytest.mark.parametrize("engine", [{"replicas": 2}, {"tensor_parallel": 2}, {"devices": [2]}])
def test_more_than_there_are_is_refused(engine: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"and there are 2, from 0 on: lower it, or name devices in `engine.devices`"):
        place_replicas(config(**engine), 2)


def test_heads_that_cannot_be_divided_are_refused() -> None:
    model = LlamaConfig(hidden_size=96, num_attention_heads=12, num_key_value_heads=2)
    for size in (1, 2, 4, 6):
        check_tensor_parallel(size, model)
    for size in (3, 5, 8):
        with pytest.raises(ConfigError, match=rf"`engine.tensor_parallel` is {size}, and the model has 12"):
            check_tensor_parallel(size, model)


def test_processes_see_their_part_of_the_devices_that_the_run_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_variable((1, 2)) == {"CUDA_VISIBLE_DEVICES": "1,2"} and device_variable(()) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert device_variable((1,)) == {"CUDA_VISIBLE_DEVICES": "6"}
