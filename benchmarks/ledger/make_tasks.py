"""Write ledgers of the questions of `examples/calc_plain`: the same bytes every time."""

import json
from pathlib import Path

ENTRIES = 4
"""Of a ledger: all of them must be right."""
FOLDER = Path(__file__).parent
QUESTIONS = Path(__file__).parents[2] / "examples" / "calc_plain"


def make(name: str) -> None:
    """Write one file of ledgers."""
    rows = [json.loads(line) for line in (QUESTIONS / name).read_text(encoding="utf-8").splitlines()]
    with (FOLDER / name).open("w", encoding="utf-8") as file:
        for start in range(0, len(rows) - ENTRIES + 1, ENTRIES):
            ledger = {"id": rows[start]["id"], "entries": rows[start : start + ENTRIES]}
            file.write(json.dumps(ledger) + "\n")


if __name__ == "__main__":
    for split in ("tasks.jsonl", "held_out.jsonl"):
        make(split)
