"""benchmarks/scale.py: workers and agents that are simulated keep rollouts open, and nothing of them is lost."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import scale  # its folder is on the path only now


async def test_rollouts_are_replaced_as_they_finish_and_none_is_lost(tmp_path: Path) -> None:
    found = await scale.measure(tmp_path, rollouts=40, seconds=0.5, think_s=0.1)
    assert found["workers"] == 4 and found["finished"] > 0 == found["lost"]
    assert found["calls"]["count"] > 0
    assert "Traceback" not in (tmp_path / "server.log").read_text()


def test_the_lines_are_fitted_through_all_sizes() -> None:
    def one(size: int) -> dict[str, object]:
        return {"memory_mb": 100 + size / 100, "calls": {"p99_ms": 5.0}, "cpu_ms_per_call": 2.0}

    found = scale.summarise({size: one(size) for size in (1000, 3000, 10_000)})
    assert found["lines"]["memory_mb"] == {"at_0": 100.0, "per_1000": 10.0}
    assert found["lines"]["calls_p99_ms"] == {"at_0": 5.0, "per_1000": 0.0} and found["ratio"] == 1.0
