"""Make the tasks of this example from GSM8K, with numbers beyond mental arithmetic.

    python examples/calc/prepare.py [--data DIR] [FOLDER]

DIR has `gsm8k_train.jsonl` and `gsm8k_test.jsonl`, plain or with `.xz`, whose lines have `question` and `answer`.
Without it both files are downloaded from the dataset's repository. FOLDER (`data` beside this file) gets `train.jsonl`
and `test.jsonl`: the problems that `large_numbers.py` can rewrite, about one in six. The same tasks every time.
"""

import argparse
import json
import lzma
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from large_numbers import rewrite

SPLITS = ("train", "test")
SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"


def read_lines(data: Path | None, split: str, source: str) -> Iterator[str]:
    """Yield the lines of a split, from a folder or from the dataset's repository."""
    if data is None:
        with urllib.request.urlopen(f"{source}/{split}.jsonl") as response:
            yield from (line.decode() for line in response)
        return
    plain, packed = data / f"gsm8k_{split}.jsonl", data / f"gsm8k_{split}.jsonl.xz"
    with plain.open(encoding="utf-8") if plain.exists() else lzma.open(packed, "rt", encoding="utf-8") as file:
        yield from file


def tasks(lines: Iterable[str], split: str) -> Iterator[dict[str, Any]]:
    """Yield what the agent and the reward function are given."""
    for number, line in enumerate(lines):
        row, id = json.loads(line), f"{split}-{number:04}"
        if (rewritten := rewrite(row["question"], row["answer"], Random(id))) is not None:
            question, answer = rewritten
            yield {"id": id, "question": question, "answer": answer}


def prepare(data: Path | None, folder: Path, source: str = SOURCE) -> dict[str, int]:
    """Write the tasks; how many there are of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split in SPLITS:
        written = [json.dumps(task) + "\n" for task in tasks(read_lines(data, split, source), split)]
        (folder / f"{split}.jsonl").write_text("".join(written), encoding="utf-8")
        counts[split] = len(written)
    return counts


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with GSM8K's files; none: download them")
    parser.add_argument("--source", default=SOURCE, help="where to download from")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "data")
    options = parser.parse_args()
    print(json.dumps(prepare(options.data, options.folder, options.source)))


if __name__ == "__main__":
    main()
