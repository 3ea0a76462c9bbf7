"""The benchmark of whole steps runs, with a few short steps of Leyden alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.mark.slow
def test_the_parts_of_every_step_are_timed() -> None:
    import loop  # it sets how torch's threads wait

    plan = {"tasks": 1, "group": 2, "tokens": 4, "warmup": 1, "steps": 2, "learning_rate": 1e-6, "model": "spark"}
    command = [sys.executable, "-c", loop.ALONE, json.dumps(plan)]
    ran = subprocess.run(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found["steps"]) == 2 and found["prompt_tokens"] > 0 and found["checkpoint_s"]
    assert all(set(step) == {"step", *loop.PARTS} and step["step"] > step["gradient"] > 0 for step in found["steps"])
