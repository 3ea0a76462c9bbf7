"""A corpus on disk with full-text search: SQLite's FTS5, ranked by BM25.

The index is built from a stream, one passage at a time, and read through a memory map. Neither building nor searching
holds the corpus in memory: the number of passages is limited by the disk.
"""

import re
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TITLE_WEIGHT = 2.0
"""What a word in the title counts, relative to one in the text."""
MAPPED_BYTES = 1 << 40
WORD = re.compile(r"\w+")
STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "by", "did", "do", "does", "for", "from", "had", "has", "have"),
        *("he", "her", "his", "how", "in", "is", "it", "its", "of", "on", "or", "she", "that", "the", "their", "they"),
        *("this", "to", "was", "were", "what", "when", "where", "which", "who", "whom", "whose", "why", "with"),
    )
)


class Passage(NamedTuple):
    """One passage of the corpus."""

    title: str
    text: str


class Passages:
    """Searches a corpus. It may be used by many threads and processes at once."""

    def __init__(self, path: str | Path) -> None:
        self._uri = f"{Path(path).resolve().as_uri()}?mode=ro&immutable=1"
        self._connections: list[sqlite3.Connection] = []

    def search(self, query: str, limit: int) -> list[Passage]:
        """Return the passages that match best any of the query's words, the best first."""
        words = [word.lower() for word in WORD.findall(query)]
        words = [word for word in words if word not in STOP_WORDS] or words
        if not words:
            return []
        matching = " OR ".join(f'"{word}"' for word in dict.fromkeys(words))
        statement = "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages, ?, 1.0) LIMIT ?"
        return [Passage(*row) for row in self._read(statement, (matching, TITLE_WEIGHT, limit))]

    def get(self, number: int) -> Passage:
        """Return the passage with a number, counted from 1 in the order of the corpus."""
        return Passage(*self._read("SELECT title, text FROM passages WHERE rowid = ?", (number,))[0])

    def __iter__(self) -> Iterator[Passage]:
        connection = self._connect()
        try:
            for row in connection.execute("SELECT title, text FROM passages ORDER BY rowid"):
                yield Passage(*row)
        finally:
            connection.close()

    def _read(self, statement: str, values: tuple[object, ...]) -> list[tuple[str, str]]:
        try:
            connection = self._connections.pop()
        except IndexError:
            connection = self._connect()
        try:
            return connection.execute(statement, values).fetchall()
        finally:
            self._connections.append(connection)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
        connection.execute(f"PRAGMA mmap_size = {MAPPED_BYTES}")
        return connection


def build(passages: Iterable[Passage], path: Path) -> int:
    """Write the index of a stream of passages; how many there were. An index that is there already is replaced."""
    unfinished = path.with_suffix(".building")
    unfinished.unlink(missing_ok=True)
    connection = sqlite3.connect(unfinished)
    try:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize = 'porter unicode61')")
        connection.executemany("INSERT INTO passages VALUES (?, ?)", passages)
        connection.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        connection.commit()
        (number,) = connection.execute("SELECT count(*) FROM passages").fetchone()
    finally:
        connection.close()
    unfinished.replace(path)
    return int(number)
