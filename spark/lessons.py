"""Conversations as spark reads them: token ids, and which of them an assistant said and so are learned.

Conversation `index` of `seed` is the same in every process and on every machine.
"""

from collections.abc import Iterator
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from random import Random

import numpy as np
from conversations import conversation

from leyden.rendering.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[1] / "src/leyden/models/spark"
POSITIONS = 4096
CHUNK = 500
WIDTHS = (96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, POSITIONS)
Lesson = tuple[np.ndarray, np.ndarray]
_tokenizer = Tokenizer.load(FOLDER)
_START, _END = _tokenizer.encode("<|im_start|>assistant\n"), _tokenizer.encode("<|im_end|>")[0]


def lesson(seed: int, index: int) -> Lesson:
    """Return the tokens of one conversation, at most spark's positions, and a mark on each that is to be learned."""
    messages, tools, _ = conversation(Random(f"{seed}/{index}"))
    ids = _tokenizer.apply_chat_template(messages, tools=tools or None)[:POSITIONS]
    learned = np.zeros(len(ids), dtype=bool)
    at = 0
    while at < len(ids):
        if ids[at : at + len(_START)] == _START:
            start = at + len(_START)
            at = ids.index(_END, start) + 1 if _END in ids[start:] else len(ids)
            learned[start:at] = True
        else:
            at += 1
    return np.array(ids, dtype=np.uint16), learned


def _chunk(interval: tuple[int, int, int]) -> list[Lesson]:
    seed, start, end = interval
    return [lesson(seed, index) for index in range(start, end)]


def lessons(seed: int, number: int, processes: int) -> list[Lesson]:
    """Return the first `number` lessons of a seed, made side by side."""
    intervals = [(seed, start, min(start + CHUNK, number)) for start in range(0, number, CHUNK)]
    with get_context("fork").Pool(processes) as pool:
        return [one for chunk in pool.imap(_chunk, intervals) for one in chunk]


def batches(taught: list[Lesson], tokens: int, seed: int) -> Iterator[Lesson]:
    """Yield all lessons once: rows of like length, padded with 0, about so many tokens a batch, in random order.

    Widths are few (steps of a fifth or so), so that a GPU meets the same shapes again.
    """
    rng = np.random.default_rng(seed)
    lengths = np.array([len(ids) for ids, _ in taught])
    groups = []
    for low, width in pairwise((0, *WIDTHS)):
        rows = rng.permutation(np.flatnonzero((lengths > low) & (lengths <= width)))
        size = max(1, tokens // width)
        groups += [(width, rows[start : start + size]) for start in range(0, len(rows), size)]
    for index in rng.permutation(len(groups)):
        width, rows = groups[index]
        ids_rows, learned_rows = np.zeros((len(rows), width), dtype=np.int64), np.zeros((len(rows), width), dtype=bool)
        for row, at in enumerate(rows):
            ids, learned = taught[at]
            ids_rows[row, : len(ids)], learned_rows[row, : len(ids)] = ids, learned
        yield ids_rows, learned_rows
