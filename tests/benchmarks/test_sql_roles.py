"""What the roles of the SQL agent did is counted by executing their queries."""

import gzip
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RIGHT, WRONG = "```sql\nSELECT max(x) FROM t\n```", "```sql\nSELECT min(x) FROM t\n```"
ACCEPTED, REJECTED = "VERDICT: CORRECT", "VERDICT: WRONG"


def rollout(step: int, task: str, *answers: str, reward: float) -> dict[str, Any]:
    roles = ["writer", *["checker", "rewriter"] * len(answers)]
    calls = [{"role": role, "tokens": 4, "answer": answer} for role, answer in zip(roles, answers, strict=False)]
    return {"step": step, "task": task, "reward": reward, "calls": calls}


@pytest.mark.slow
def test_right_queries_rejections_and_repairs_are_counted(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "numbers.sqlite") as database:
        database.executescript("create table t (x int); insert into t values (1), (2);")
    task = {"question": "?", "database": str(tmp_path / "numbers.sqlite"), "query": "SELECT max(x) FROM t"}
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"id": name, **task}) + "\n" for name in "ab"))
    rows = [
        rollout(0, "a", RIGHT, REJECTED, WRONG, ACCEPTED, reward=0.0),
        rollout(0, "b", WRONG, REJECTED, RIGHT, ACCEPTED, reward=1.0),
        rollout(8, "a", RIGHT, ACCEPTED, reward=1.0),
        rollout(8, "b", RIGHT, ACCEPTED, reward=1.0),
    ]
    with gzip.open(tmp_path / "kept.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    words = ["benchmarks/sql_roles.py", tmp_path / "kept.jsonl.gz", "--tasks", tmp_path / "tasks.jsonl"]
    ran = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    before, after = found["steps"]["0"], found["steps"]["8"]
    assert (before["first_right"], before["any_right"], before["succeeded"]) == (1, 2, 1)
    assert (before["right_rejected"], before["right_rejected_kept"], before["wrong_repaired"]) == (1, 0, 1)
    assert (after["first_right"], after["right_rejected"], after["tasks_solved"]) == (2, 0, 2)
    assert (before["calls_per_rollout"], after["calls_per_rollout"], found["ratio"]) == (4.0, 2.0, 2.0)
