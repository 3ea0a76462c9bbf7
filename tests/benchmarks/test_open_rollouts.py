"""benchmarks/open_rollouts.py: thousands of open rollouts are served while hostile clients attack."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import hostile_clients  # its folder is on the path only now
import open_rollouts

SHORT = {"rollouts": 60, "seconds": 0.6, "think_s": 1.0, "scale": 0.02}
FULL = {"rollouts": 10_000, "seconds": 30.0, "think_s": 70.0, "scale": 1.0}


@pytest.mark.parametrize("size", [SHORT, pytest.param(FULL, marks=pytest.mark.slow)], ids=["short", "full"])
async def test_every_agent_is_answered_and_no_lease_is_lost_under_attack(tmp_path: Path, size: dict[str, Any]) -> None:
    found = await open_rollouts.measure(tmp_path, **size)
    assert found["rollouts"] == size["rollouts"]
    assert set(found["statuses"]) == {"200"} and not found["broken"]
    assert found["agents_without_an_answer"] == found["unrecorded"] == 0
    assert found["ended_early"] == found["unfinished"] == 0
    assert set(found["attacks"]) == set(hostile_clients.CONNECTIONS)
    assert max(found["memory_mb"].values()) < found["memory_mb"]["before"] + 1000
    assert found["exit_status"] == 0
    assert "Traceback" not in (tmp_path / "server.log").read_text()
