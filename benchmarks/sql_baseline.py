"""The SQL agent's held-out reward before training, pooled over all recorded runs, beside that after training.

    python benchmarks/sql_baseline.py --out results/sql

Every run of the SQL agent in results/sql measured the same untrained model on the same rows before its first step,
sampled at temperature 1. Pooled, these are one better measurement of where all runs began; each run's own is a sample
of it. Reads the runs' metrics and measures nothing. The last line is one JSON object; `ratio` is the reward after
training of the run in results/sql over the pooled reward before.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from reporting import add_out, report_result

RESULTS = Path(__file__).parents[1] / "results" / "sql"
RUNS = {"sql": RESULTS, **{name: RESULTS / name for name in ("short", "long", "wide")}}


def evaluations(run: Path) -> list[float]:
    """Return the held-out rewards of a run, the first of which is that before training."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert rows[0]["step"] == 0, f"{run} has no measurement before training"
    return [row["held_out/reward"] for row in rows if "held_out/reward" in row]


def pooled() -> dict[str, Any]:
    """Return the baseline, the measurements that it is pooled over, and what training made of it."""
    rows = {name: json.loads((run / "summary.json").read_text(encoding="utf-8"))["rows"] for name, run in RUNS.items()}
    assert len(set(rows.values())) == 1, "runs with other numbers of rows cannot be pooled with equal weights"
    rewards = {name: evaluations(run) for name, run in RUNS.items()}
    before = fmean(found[0] for found in rewards.values())
    after = rewards["sql"][-1]
    return {
        "ratio": round(after / before, 3),
        "before_pooled": round(before, 4),
        "right": round(before * sum(rows.values())),
        "of": sum(rows.values()),
        "before": {name: round(found[0], 4) for name, found in rewards.items()},
        "after": {name: round(found[-1], 4) for name, found in rewards.items()},
    }


def main() -> None:
    """Print the baseline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_out(parser)
    options = parser.parse_args()
    report_result(pooled(), options.out)


if __name__ == "__main__":
    main()
