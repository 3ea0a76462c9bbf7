"""Make the tasks of this example from files of Spider.

    python examples/sql/prepare.py --data DIR FOLDER

DIR has `train.json`, `dev.json` (with `question`, `query`, `db_id` and `gold`) and `database.tar`, each plain or with
`.xz`. FOLDER gets the databases, `train.jsonl` and `dev.jsonl`. Only rows whose `gold` is `ok` are taken: an
empty gold result would reward every query that returns nothing.
"""

import argparse
import json
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPLITS = ("train", "dev")


def read_rows(data: Path, split: str) -> list[dict[str, Any]]:
    """Return the rows of a split."""
    plain, packed = data / f"{split}.json", data / f"{split}.json.xz"
    with plain.open(encoding="utf-8") if plain.exists() else lzma.open(packed, "rt", encoding="utf-8") as file:
        rows: list[dict[str, Any]] = json.load(file)
    return rows


def tasks(rows: list[dict[str, Any]], split: str, folder: Path) -> Iterator[dict[str, str]]:
    """Yield what the agent and the reward function are given."""
    for number, row in enumerate(rows):
        if row["gold"] == "ok":
            database = folder / "database" / row["db_id"] / f"{row['db_id']}.sqlite"
            yield {
                "id": f"{split}-{number:04}",
                "question": row["question"],
                "database": str(database.resolve()),
                "query": row["query"],
            }


def prepare(data: Path, folder: Path) -> dict[str, int]:
    """Unpack the databases and write the tasks; how many there are of each split."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = next(path for path in (data / "database.tar", data / "database.tar.xz") if path.exists())
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    counts = {}
    for split in SPLITS:
        lines = [json.dumps(task) + "\n" for task in tasks(read_rows(data, split), split, folder)]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        counts[split] = len(lines)
    return counts


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with Spider's files")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "data")
    options = parser.parse_args()
    print(json.dumps(prepare(options.data, options.folder)))


if __name__ == "__main__":
    main()
