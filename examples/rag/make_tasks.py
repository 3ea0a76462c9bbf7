"""Make a small corpus and questions about it, for the bundled model.

    python examples/rag/make_tasks.py [FOLDER]

FOLDER (`data/spark` beside this file) gets `train.jsonl`, `test.jsonl` and `passages.db`: people, books and companies
that do not exist, and questions that need one search or two. Spark was taught none of these questions. The same tasks
every time.
"""

import argparse
import json
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[2] / "spark"))

from families import lookup
from families.problem import Problem, Split
from passages import Passage, build

SIZES: dict[str, tuple[Split, int]] = {"train": ("train", 320), "test": ("held_out", 100)}
KINDS = ("person", "thing", "hop")


def problems(split: Split, number: int, corpus: dict[str, str]) -> list[Problem]:
    """Problems of a split. Their documents join the corpus; no problem needs a document that contradicts it."""
    rng = Random(f"rag/{split}")
    found: dict[str, Problem] = {}
    while len(found) < number:
        problem = lookup.problem(rng, split)
        documents = dict(problem.facts["documents"])
        agrees = all(corpus.get(name, documents[name]) == documents[name] for name in problem.facts["names"])
        if problem.facts["kind"] in KINDS and agrees and problem.key not in found:
            found[problem.key] = problem
            corpus.update({name: text for name, text in documents.items() if name not in corpus})
    return list(found.values())


def make(folder: Path) -> dict[str, int]:
    """Write tasks and index into a folder; how many there are of each."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus: dict[str, str] = {}
    counts, index = {}, folder / "passages.db"
    searched = {"index": str(index.resolve()), "passages": 1}
    for name, (split, number) in SIZES.items():
        made = problems(split, number, corpus)
        rows = [
            {"id": f"{name}-{at:03}", "question": problem.question, "answer": str(problem.answer), **searched}
            for at, problem in enumerate(made)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        counts[name] = len(rows)
    passages = (Passage(title, text) for title, text in sorted(corpus.items()))
    return {**counts, "passages": build(passages, index)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "data" / "spark")
    print(json.dumps(make(parser.parse_args().folder)))
