"""How rows lie in a batch: as the prefix tree of their tokens, each distinct one computed once, or one by one.

Either way each row knows where the predictors of its completion are, so that every loss stays the textbook one.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from leyden.rl.tree import Tree, divide, grow
from leyden.trainer.batch import Row


class Sheet(Struct, frozen=True):
    """A batch of sequences, padded to the right."""

    rows: list[int]
    """Which rows lie on it, in the order of `predictors`."""
    ids: Tensor
    positions: Tensor | None
    """None: 0, 1, 2 and so on."""
    mask: Tensor | None
    """Who attends to whom; None: each to all before it."""
    predictors: Tensor
    """Of every completion token, row after row: where in the flattened batch its predictor is."""
    computed: int
    """Tokens, padding apart."""


def lay_rows(rows: Sequence[Row], most: int, square: float) -> Iterator[Sheet]:
    """One row a call."""
    for batch in _batches([len(row) for row in rows], most):
        width = len(rows[batch[0]])
        ids = np.zeros((len(batch), width), dtype=np.int64)
        predictors = []
        for line, index in enumerate(batch):
            row = rows[index]
            ids[line, : len(row)] = (*row.prompt_ids, *row.completion_ids)
            start = line * width + len(row.prompt_ids) - 1
            predictors.append(np.arange(start, start + len(row.completion_ids)))
        computed = sum(len(rows[index]) for index in batch)
        yield Sheet(batch, torch.from_numpy(ids), None, None, torch.from_numpy(np.concatenate(predictors)), computed)


def lay_trees(rows: Sequence[Row], most: int, square: float) -> Iterator[Sheet]:
    """Rows as prefix trees; a tree of `square` tokens spends as much on its dense attention as on all else."""
    sequences = [(*row.prompt_ids, *row.completion_ids) for row in rows]
    groups = list(divide(sequences, most, square))
    trees = [grow([sequences[index] for index in group]) for group in groups]
    for batch in _batches([len(tree.ids) for tree in trees], most):
        yield _tree_sheet(rows, [(groups[number], trees[number]) for number in batch])


def _tree_sheet(rows: Sequence[Row], trees: Sequence[tuple[list[int], Tree]]) -> Sheet:
    width = len(trees[0][1].ids)
    ids, depths = np.zeros((2, len(trees), width), dtype=np.int64)
    ends = np.tile(np.arange(1, width + 1), (len(trees), 1))  # padding sees itself, and nobody sees padding
    order, predictors = [], []
    for line, (group, tree) in enumerate(trees):
        ids[line, : len(tree.ids)] = tree.ids
        depths[line, : len(tree.ids)] = tree.depths
        ends[line, : len(tree.ids)] = tree.ends
        for index, path in zip(group, tree.paths, strict=True):
            order.append(index)
            predictors.append(line * width + path[len(rows[index].prompt_ids) - 1 : -1])
    place = torch.arange(width)
    mask = (place[None, None, :] <= place[None, :, None]) & (place[None, :, None] < torch.from_numpy(ends)[:, None, :])
    return Sheet(
        rows=order,
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(depths),
        mask=mask[:, None],
        predictors=torch.from_numpy(np.concatenate(predictors)),
        computed=sum(len(tree.ids) for _, tree in trees),
    )


def _batches(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Things of like size together, so many tokens at once; the first of a batch is its largest."""
    batch: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if batch and (len(batch) + 1) * sizes[batch[0]] > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
