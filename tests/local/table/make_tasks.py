"""The tasks of this folder: one number of one row of a small table, none of which spark was taught."""

import json
import sys
from functools import cache
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[3] / "spark"))

from families import sql
from families.problem import Problem, Split

FILES: dict[str, tuple[Split, int]] = {"tasks.jsonl": ("train", 256), "held_out.jsonl": ("held_out", 64)}
FORM = "of"
"""What is the COLUMN of NAME?"""


@cache
def problems(split: Split, number: int) -> list[Problem]:
    """Problems of a split, no two of them alike."""
    rng = Random(f"table/{split}")
    found: dict[str, Problem] = {}
    while len(found) < number:
        problem = sql.problem(rng, split)
        if problem.facts["form"] == FORM:
            found.setdefault(problem.key, problem)
    return list(found.values())


def make(folder: Path) -> None:
    """Write the files into a folder: the same bytes every time."""
    for name, (split, number) in FILES.items():
        with (folder / name).open("w", encoding="utf-8") as file:
            for at, problem in enumerate(problems(split, number)):
                row = {"id": f"{split}-{at:03}", "question": problem.question.partition("\n")[2]}
                row |= {key: problem.facts[key] for key in ("schema", "rows")} | {"answer": problem.answer}
                file.write(json.dumps(row) + "\n")
