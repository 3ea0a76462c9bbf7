"""Make small databases and questions about them, for the bundled model.

    python examples/sql/make_tasks.py [FOLDER]

FOLDER (`data/spark` beside this file) gets `train.jsonl`, `test.jsonl` and one database of one table for each question.
Spark was taught none of these questions. The same tasks every time.
"""

import argparse
import json
import sqlite3
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2] / "spark"))

from families import sql
from families.problem import Problem, Split

SIZES: dict[str, tuple[Split, int]] = {"train": ("train", 320), "test": ("held_out", 100)}


def problems(split: Split, number: int) -> list[Problem]:
    """Problems of a split, no two of them alike."""
    rng = Random(f"sql/{split}")
    found: dict[str, Problem] = {}
    while len(found) < number:
        problem = sql.problem(rng, split)
        found.setdefault(problem.key, problem)
    return list(found.values())


def write_database(problem: Problem, path: Path) -> None:
    """Write the problem's table as a SQLite file."""
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    try:
        connection.execute(problem.facts["schema"])
        values = ", ".join("?" * len(problem.facts["columns"]))
        connection.executemany(f"INSERT INTO {problem.facts['table']} VALUES ({values})", problem.facts["rows"])
        connection.commit()
    finally:
        connection.close()


def make(folder: Path) -> dict[str, int]:
    """Write tasks and databases into a folder; how many tasks there are of each split."""
    (folder / "database").mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, (split, number) in SIZES.items():
        rows = []
        for at, problem in enumerate(problems(split, number)):
            database = folder / "database" / f"{name}-{at:03}.sqlite"
            write_database(problem, database)
            row = {"id": database.stem, "question": problem.question.partition("\n")[2]}
            rows.append(
                {**row, "database": str(database.resolve()), "query": sql.query(problem, sql.right(problem.facts))}
            )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        counts[name] = len(rows)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "data" / "spark")
    print(json.dumps(make(parser.parse_args().folder)))
