"""An agent with a tight time limit learns to be brief: time-outs inside a call teach."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from brief import summarise, train_brief

import leyden.local.engine
from leyden.engine.torch.engine import TorchEngine
from leyden.records import CallStatus


@pytest.mark.slow
def test_time_outs_teach_a_model_to_be_brief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leyden.local.engine, "TorchEngine", TorchEngine)  # restores it after the script's own change
    trained = train_brief(tmp_path, steps=16, limit_s=7.2, pace_s=0.2)
    first = [call for number in range(4) for one in trained.episodes(f"step-1-{number}") for call in one.calls]
    assert any(call.status is CallStatus.CUT and call.completion_ids for call in first)
    found = summarise(trained)
    assert sum(found["excluded_by_step"]) == 0
    assert found["timeouts_held_out"][1] < found["timeouts_held_out"][0] / 2
    assert found["length"][1] < found["length"][0] - 4
