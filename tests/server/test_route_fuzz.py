"""benchmarks/fuzz.py: mutated requests over every route never fail the server, nor keep others waiting."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz  # its folder is on the path only now


def test_every_route_with_a_body_has_a_valid_one() -> None:
    lacking = [route.path for route in fuzz.ROUTES if route.body is not None and not fuzz.body_of(route.path)]
    assert lacking == []


@pytest.mark.parametrize("requests", [400, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_mutated_requests_over_every_route_fail_nothing(tmp_path: Path, requests: int) -> None:
    found = await fuzz.fuzz(tmp_path, requests, seed=5)
    assert found["failed"] == 0 and found["exit_status"] == 0
    assert found["reached"] > 0.5
    assert found["longest_wait_s"] < 5
    assert found["memory_mb_after"] < found["memory_mb_before"] + 300
    assert "Traceback" not in (tmp_path / "server.log").read_text()
