"""What the roles of the SQL agent do before and after training: right queries, verdicts and repairs, by execution.

    python benchmarks/sql_roles.py RUN --tasks SPIDER/dev.jsonl --keep held_out.jsonl.gz
    python benchmarks/sql_roles.py results/sql/refill/held_out.jsonl.gz --tasks SPIDER/dev.jsonl --name roles

RUN is the folder of a run of examples/sql, whose first and last evaluation are compared, or the file in which these
rollouts were kept. Every query is executed and compared with the gold one. `first_right` counts rollouts whose first
query is right, `any_right` those in which any query is, `right_rejected` the right first queries that the checker sent
to the rewriter, `wrong_repaired` the wrong first queries after which the rollout succeeded all the same, and
`tasks_solved` the tasks of which any rollout succeeds. `ratio` is the share of rollouts that succeed after training
over that before. The last line is one JSON object.
"""

import argparse
import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from reporting import add_out, report_result

from leyden.api.wire import RolloutPage
from leyden.records import Purpose
from leyden.store.database import Database
from leyden.store.read import queries

os.environ.setdefault("OPENAI_API_KEY", "none")  # the agent makes its client when it is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "sql"))

from agent import parse_query
from reward import reward

Row = dict[str, Any]


def read_run(run: Path) -> Iterator[Row]:
    """Yield the rollouts of the first and the last evaluation of a run."""
    database = Database(run / "leyden.db", readonly=True)
    try:
        with database.reader.begin() as look:
            listed = queries.list_rollouts(look, run.name, RolloutPage(limit=1_000_000))
            step_of = {one.group: one.step for one in listed if one.purpose is Purpose.EVAL}
            first, last = min(step_of.values()), max(step_of.values())
            for group in (group for group, step in step_of.items() if step in (first, last)):
                for episode in queries.group_episodes(look, run.name, group):
                    answers = [
                        {
                            "role": episode.role(call),
                            "tokens": len(call.completion_ids),
                            "answer": (call.response or {}).get("content") or "",
                        }
                        for call in episode.calls
                    ]
                    found = {"task": episode.task.id, "reward": episode.final_reward(0.0), "calls": answers}
                    yield {"step": step_of[group], **found}
    finally:
        database.close()


def read_rows(source: Path) -> list[Row]:
    """Return the rollouts of a run's folder, or of the file that they were kept in."""
    if source.is_dir():
        return list(read_run(source))
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def count(rows: list[Row], tasks: dict[str, Row]) -> dict[str, Any]:
    """Return what the roles did in some rollouts."""

    @cache
    def is_right(task: str, query: str) -> bool:
        return reward(tasks[task], query) == 1

    counts: Counter[str] = Counter()
    for row in rows:
        roles = [call["role"] for call in row["calls"]]
        right = [
            is_right(row["task"], parse_query(call["answer"])) for call in row["calls"] if call["role"] != "checker"
        ]
        success, first, rejected = row["reward"] == 1, bool(right and right[0]), "rewriter" in roles
        counts["succeeded"] += success
        counts["first_right"] += first
        counts["any_right"] += any(right)
        counts["right_rejected"] += first and rejected
        counts["right_rejected_kept"] += first and rejected and success
        counts["wrong_rejected"] += not first and rejected
        counts["wrong_repaired"] += not first and rejected and success
    tokens = {
        role: round(fmean(found), 1)
        for role in ("writer", "checker", "rewriter")
        if (found := [call["tokens"] for row in rows for call in row["calls"] if call["role"] == role])
    }
    solved = {row["task"] for row in rows if row["reward"] == 1}
    return {
        "rollouts": len(rows),
        **counts,
        "tasks": len({row["task"] for row in rows}),
        "tasks_solved": len(solved),
        "calls_per_rollout": round(fmean(len(row["calls"]) for row in rows), 2),
        "tokens_per_call": tokens,
    }


def main() -> None:
    """Count what the roles did before and after training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder of a run, or a file of its kept rollouts")
    parser.add_argument("--tasks", type=Path, required=True, help="the held-out tasks, as prepare.py writes them")
    parser.add_argument("--keep", type=Path, help="write the rollouts to this file")
    parser.add_argument("--name", default="benchmark", help="of the file of the result")
    add_out(parser)
    options = parser.parse_args()
    rows = read_rows(options.source)
    if options.keep is not None:
        with gzip.open(options.keep, "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
    found = map(json.loads, options.tasks.read_text(encoding="utf-8").splitlines())
    tasks = {task["id"]: task for task in found}
    steps = sorted({row["step"] for row in rows})
    counted = {step: count([row for row in rows if row["step"] == step], tasks) for step in steps}
    for step, one in counted.items():
        print(f"step {step}:", json.dumps(one), flush=True)
    before, after = counted[steps[0]], counted[steps[-1]]
    shares = [one["succeeded"] / one["rollouts"] for one in (before, after)]
    ratio = round(shares[1] / shares[0], 3) if shares[0] else None
    report_result({"ratio": ratio, "steps": counted}, options.out, options.name)


if __name__ == "__main__":
    main()
