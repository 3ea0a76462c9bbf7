"""A run that does not set its learning rate has the default for its model, and keeps it when it is resumed."""

from pathlib import Path

import msgspec
import pytest

from leyden.cli.train import absolute
from leyden.config import AdapterConfig, Config, ConfigError
from leyden.local.learning_rate import with_learning_rates
from leyden.models.source import find_model
from leyden.runs.run_folder import RunFolder

SPARK = find_model("spark", ".")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "a.py").write_text("def solve(task): ...")
    (tmp_path / "t.jsonl").write_text("{}\n")
    return Config(
        run="mine", agent="a.py:solve", tasks="t.jsonl", home=str(tmp_path / "runs"), base=str(tmp_path), model="spark"
    )


def train(config: Config, steps: str = '{"step": 1}\n') -> tuple[float | None, str]:
    """Start a run and train a step; return its learning rate and what was said about it."""
    folder = RunFolder.of(config)
    chosen, (said,) = with_learning_rates(config, folder)
    with folder.acquire(chosen):
        folder.metrics_file.write_text(steps)
    return chosen.training.learning_rate, said


def with_training(config: Config, **training: object) -> Config:
    return msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, **training))


def test_the_default_is_written_into_the_folder_and_kept(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    rate, said = train(config)
    assert rate == 8e-4 and "0.0008, the default for 2 million parameters" in said
    assert "learning_rate = 0.0008" in RunFolder.of(config).config_file.read_text()
    monkeypatch.setattr("leyden.local.learning_rate.default_learning_rate", lambda *_: 1.0)  # of a later Leyden
    RunFolder.of(config).check(config)  # what the command does first
    assert train(config) == (8e-4, "learning rate 0.0008, with which the run began")
    with pytest.raises(ConfigError, match=r"`training\.learning_rate` is not what run"):
        train(with_training(config, learning_rate=1e-4))


def test_before_the_first_step_it_is_chosen_again(config: Config) -> None:
    assert train(config, steps='{"step": 0}\n')[0] == 8e-4
    rate, said = train(with_training(config, lora=AdapterConfig()), steps="")
    assert rate == 8e-3 and "the default for adapters of 2 million parameters" in said
    assert train(with_training(config, learning_rate=0.5)) == (0.5, "learning rate 0.5, as configured")


def test_a_bundled_model_is_meant_although_a_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spark").mkdir()
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert (absolute("spark"), absolute("mine")) == ("spark", str(tmp_path / "mine"))
