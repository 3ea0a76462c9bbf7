"""Make the tasks and the corpus of this example from multi-hop questions.

    python examples/rag/prepare.py [--data DIR] [--corpus FILE] [FOLDER]

DIR has `NAME_questions.jsonl` and `NAME_corpus.jsonl`, plain or with `.xz`, of any number of datasets. Questions have
`question`, `answer`, `fold` (`train` or `test`) and `complete`: whether the corpus has all passages that the question
needs. Passages have `title` and `text`. Without DIR, HotpotQA's development set is downloaded, whose questions come
with the passages around them.

Tasks are the complete questions that need more than one search: some passage states the answer, but neither the
question nor the first passages that a search for it finds.

FILE is another corpus: JSON lines, or the tab-separated `psgs_w100.tsv` of DPR (`.gz` or `.xz` too), whose 21 million
passages of Wikipedia are a matter of disk: passages are read, and indexed, one at a time.

FOLDER (`data` beside this file) gets `train.jsonl`, `test.jsonl` and `passages.db`.
"""

import argparse
import csv
import gzip
import hashlib
import json
import lzma
import urllib.request
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from passages import Passage, Passages, build
from reward import answers, holds

FOLDS = ("train", "test")
PASSAGES = 3
"""How many a search of the agent returns."""
MANY = 50
"""How many passages are looked through for one that states the answer."""
SOURCE = "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json"
Row = dict[str, Any]


def open_text(path: Path) -> TextIO:
    """Return a text file that may be packed."""
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file of JSON lines, one at a time."""
    with open_text(path) as file:
        for line in file:
            yield json.loads(line)


def read_passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of a corpus, one at a time."""
    if ".tsv" not in path.name:
        yield from (Passage(row["title"], row["text"]) for row in read_rows(path))
        return
    with open_text(path) as file:
        for row in csv.DictReader(file, delimiter="\t"):
            yield Passage(row["title"], row["text"])


def tasks(rows: Iterable[Row], fold: str, index: Path) -> Iterator[Row]:
    """Yield what the agent and the reward function are given."""
    passages, searched = Passages(index), {"index": str(index.resolve()), "passages": PASSAGES}
    for row in rows:
        task = {key: row[key] for key in ("id", "question", "answer")}
        task |= {"aliases": row.get("answer_aliases", []), **searched}
        if row["fold"] == fold and row["complete"] and needs_searches(task, passages):
            yield task


def needs_searches(task: Row, passages: Passages) -> bool:
    """Whether some passage states an answer, and neither the question nor a search for it does."""

    def stated(*texts: str) -> bool:
        return any(holds(text, answer) for text in texts for answer in answers(task))

    first = (" ".join(passage) for passage in passages.search(task["question"], PASSAGES))
    with_answer = (" ".join(passage) for passage in passages.search(task["answer"], MANY))
    no_fact = task["answer"].lower() in ("yes", "no")
    return not no_fact and not stated(task["question"], *first) and stated(*with_answer)


def download_hotpotqa(source: str) -> tuple[list[Row], list[Passage]]:
    """HotpotQA's questions, a fifth of them for testing, and the distinct passages around them."""
    with urllib.request.urlopen(source) as response:
        published = json.load(response)
    questions = [
        {
            "id": row["_id"],
            "question": row["question"],
            "answer": row["answer"],
            "fold": "test" if hashlib.sha256(row["_id"].encode()).digest()[0] < 51 else "train",
            "complete": True,
        }
        for row in published
    ]
    passages = (Passage(title, "".join(sentences)) for row in published for title, sentences in row["context"])
    return questions, list(dict.fromkeys(passages))


def prepare(data: Path | None, corpus: Path | None, folder: Path, source: str = SOURCE) -> dict[str, int]:
    """Write the tasks and the index; how many there are of each."""
    folder.mkdir(parents=True, exist_ok=True)
    passages: Iterable[Passage]
    if data is None:
        questions, passages = download_hotpotqa(source)
    else:
        questions = [row for path in sorted(data.glob("*_questions.jsonl*")) for row in read_rows(path)]
        passages = chain.from_iterable(read_passages(path) for path in sorted(data.glob("*_corpus.jsonl*")))
    index = folder / "passages.db"
    counts = {"passages": build(passages if corpus is None else read_passages(corpus), index)}
    for fold in FOLDS:
        written = [json.dumps(task, ensure_ascii=False) + "\n" for task in tasks(questions, fold, index)]
        (folder / f"{fold}.jsonl").write_text("".join(written), encoding="utf-8")
        counts[fold] = len(written)
    return counts


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with questions and corpora; none: download HotpotQA")
    parser.add_argument("--corpus", type=Path, help="another corpus to search")
    parser.add_argument("--source", default=SOURCE, help="where to download HotpotQA from")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "data")
    options = parser.parse_args()
    print(json.dumps(prepare(options.data, options.corpus, options.folder, options.source)))


if __name__ == "__main__":
    main()
