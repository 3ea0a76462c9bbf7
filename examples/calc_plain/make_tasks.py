"""Write the tasks of this example: arithmetic in words, none of which spark was taught.

    python examples/calc_plain/make_tasks.py

`tasks.jsonl` is what to train on (numbers below 100); `held_out.jsonl` has other problems of the same kind;
`unseen.jsonl` has sentences that no task to train on has, about numbers from 100 on. The same bytes every time.
"""

import json
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2] / "spark"))

from families import arithmetic
from families.problem import Problem, Split

FILES: dict[str, tuple[Split, int]] = {
    "tasks.jsonl": ("train", 512),
    "held_out.jsonl": ("held_out", 100),
    "unseen.jsonl": ("unseen", 100),
}


def problems(split: Split, number: int) -> list[Problem]:
    """Problems of a split, no two of them alike."""
    rng = Random(f"calc_plain/{split}")
    found: dict[str, Problem] = {}
    while len(found) < number:
        problem = arithmetic.problem(rng, split)
        found.setdefault(problem.key, problem)
    return list(found.values())


def make(folder: Path) -> None:
    """Write the three files into a folder."""
    for name, (split, number) in FILES.items():
        with (folder / name).open("w", encoding="utf-8") as file:
            for at, problem in enumerate(problems(split, number)):
                row = {"id": f"{split}-{at:03}", "question": problem.question, "answer": problem.answer}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    make(Path(__file__).parent)
