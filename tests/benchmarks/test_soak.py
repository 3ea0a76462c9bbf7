"""benchmarks/soak.py: the memory of a server does not grow with the calls that it has answered."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import soak  # its folder is on the path only now

EVERY_S = 10.0


def test_memory_that_reaches_its_bounds_in_the_first_ten_minutes_is_flat() -> None:
    samples = [min(120.0 + number / 2, 145.0) + number % 3 for number in range(360)]
    assert soak.judge(samples, EVERY_S)["flat"]


@pytest.mark.parametrize("mb_per_sample", [0.05, 0.5])
def test_memory_that_goes_on_growing_is_not_flat(mb_per_sample: float) -> None:
    found = soak.judge([120.0 + mb_per_sample * number for number in range(360)], EVERY_S)
    assert found["slope_mb_per_min"] == pytest.approx(6 * mb_per_sample)
    assert not found["flat"]


async def test_agents_work_in_every_dialect_while_memory_is_sampled(tmp_path: Path) -> None:
    found = await soak.soak(tmp_path, minutes=0.02, rate=200, sample_s=0.3)
    assert found["rollouts"] >= soak.AGENTS and found["calls"] >= soak.AGENTS * soak.TURNS
    assert 0 < found["memory_mb"]["last"] < 1000


@pytest.mark.slow
async def test_memory_is_flat_after_the_first_ten_minutes_of_an_hour(tmp_path: Path) -> None:
    found = await soak.soak(tmp_path, minutes=60, rate=120)
    assert found["flat"], found
    assert found["runs_deleted"] > 0
