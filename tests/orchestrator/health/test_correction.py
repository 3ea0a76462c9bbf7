"""A run is told once, with advice, when the correction leaves less than half of its data in several steps."""

import pytest

from leyden.config import Config, read_config
from leyden.orchestrator.health.correction import CorrectionDetector


def config_of(max_staleness: int = 1, **algorithm: str) -> Config:
    training = {"max_staleness": max_staleness}
    return read_config({"run": "r", "agent": "a", "tasks": "t", "training": training, "algorithm": algorithm})


def statistics(token: float = 1.0, call: float = 1.0, corrected: float = 0.0) -> dict[str, float]:
    return {"ess_token": token, "ess_call": call, "corrected": corrected}


def test_a_low_effective_sample_size_is_reported_once_if_it_stays() -> None:
    detector = CorrectionDetector(config_of())
    found = [detector.add_step(statistics(token)) for token in (0.9, 0.3, 0.4, 0.8, 0.3, 0.4, 0.2, 0.1, 0.9, 0.1)]
    assert [step for step, message in enumerate(found) if message] == [6]
    assert found[6] is not None and "20% of the data by `training/ess_token`" in found[6]
    assert "lower `training.max_staleness` or `training.learning_rate`" in found[6]


@pytest.mark.parametrize(
    ("config", "step", "words"),
    [
        (config_of(), statistics(corrected=0.7), "30% of the data by `training/corrected`"),
        (config_of(), statistics(call=0.1), None),
        (config_of(correction_level="call"), statistics(call=0.1), '`algorithm.correction_ratio = "geometric"`'),
        (config_of(correction_level="call", correction_ratio="geometric"), statistics(call=0.1), None),
        (config_of(max_staleness=0), statistics(token=0.1), "engine and trainer disagree"),
        (config_of(), {}, None),  # no update
        (config_of(correction="none"), {"ess_token": 0.1, "ess_call": 0.1}, None),
    ],
)
def test_what_is_looked_at_follows_the_correction(config: Config, step: dict[str, float], words: str | None) -> None:
    detector = CorrectionDetector(config)
    found = [detector.add_step(step) for _ in range(3)][-1]
    assert found is None if words is None else found is not None and words in found
