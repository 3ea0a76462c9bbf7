"""Write ledgers: the same bytes every time.

`tasks.jsonl` and `held_out.jsonl` have four questions of `examples/calc_plain` each. In `late_tasks.jsonl` and
`late_held_out.jsonl` a ledger has twenty, and those of two steps, of which spark's teachers often made only one, stand
at the end; `routine_tasks.jsonl` and `routine_held_out.jsonl` are single questions of the kinds before.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "spark"))

from families import arithmetic
from families.problem import Split

ENTRIES = 4
"""Of a ledger: all of them must be right."""
ROUTINE = {("gain",), ("loss",), ("groups",), ("share",)}
LATE = {("gain", "loss"), ("loss", "gain"), ("groups", "gain"), ("groups", "loss"), ("together", "groups")}
"""Kinds of questions by what happens in them."""
ROUTINE_ENTRIES, LATE_ENTRIES = 12, 8
LATE_LEDGERS: dict[str, tuple[Split, int]] = {"tasks.jsonl": ("train", 160), "held_out.jsonl": ("held_out", 64)}
FOLDER = Path(__file__).parent
QUESTIONS = Path(__file__).parents[2] / "examples" / "calc_plain"


def make(name: str) -> None:
    """Write a file of ledgers of any questions, one of routine questions, and one of ledgers with a late part."""
    rows = [json.loads(line) for line in (QUESTIONS / name).read_text(encoding="utf-8").splitlines()]
    starts = range(0, len(rows) - ENTRIES + 1, ENTRIES)
    write(name, ({"id": rows[start]["id"], "entries": rows[start : start + ENTRIES]} for start in starts))
    split, number = LATE_LEDGERS[name]
    routine = questions(split, ROUTINE, number * ROUTINE_ENTRIES)
    late = questions(split, LATE, number * LATE_ENTRIES)
    write(f"routine_{name}", routine)
    write(
        f"late_{name}",
        (
            {
                "id": f"{split}-{at:03}",
                "entries": routine[at * ROUTINE_ENTRIES : (at + 1) * ROUTINE_ENTRIES]
                + late[at * LATE_ENTRIES : (at + 1) * LATE_ENTRIES],
            }
            for at in range(number)
        ),
    )


def questions(split: Split, kinds: set[tuple[str, ...]], number: int) -> list[dict[str, Any]]:
    """Return questions of some kinds, no two of them alike."""
    rng, found = Random(f"ledger/{split}/{sorted(kinds)}"), dict[str, dict[str, Any]]()
    while len(found) < number:
        problem = arithmetic.problem(rng, split)
        cues, aside = problem.facts["cues"], problem.facts["aside"]
        if cues in kinds and aside is None and problem.key not in found:
            id = f"{split}-{len(found):03}"
            found[problem.key] = {"id": id, "question": problem.question, "answer": problem.answer}
    return list(found.values())


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write one file."""
    with (FOLDER / name).open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    for split in LATE_LEDGERS:
        make(split)
