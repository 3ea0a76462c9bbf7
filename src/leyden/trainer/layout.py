"""How rows lie in a batch: as the prefix tree of their tokens, each distinct one computed once, or in plain lines.

Either way each row knows where the predictors of its completion are, so that every loss stays the textbook one.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from leyden.rl.pack import Cost, lines, pack
from leyden.rl.tree import Ints, Tree, grow
from leyden.trainer.batch import Row

_BLOCK = 128
"""Attention on a GPU goes by blocks of so many tokens."""


class Sheet(Struct, frozen=True):
    """A batch of sequences, padded to the right, and the sampled tokens whose logprobs are wanted of it."""

    rows: list[int]
    """Which rows lie on it; their tokens follow each other in this order."""
    ids: Tensor
    depths: Tensor | None
    """The position of each token; None: 0, 1, 2 and so on."""
    ends: Tensor | None
    """Where the descendants of each token stop; None: it is followed by them all."""
    predictors: Tensor
    """Of every distinct sampled token: where in the flattened batch its predictor is."""
    targets: Tensor
    temperatures: Tensor
    gather: Tensor
    """Of every sampled token of every row: which of the distinct ones it is."""
    states: Tensor
    """Of every row: where in the flattened batch its prompt ends."""
    computed: int
    """Tokens, padding apart."""


def lay_rows(rows: Sequence[Row], cost: Cost) -> Iterator[Sheet]:
    """One row a call."""
    return _lines(rows, _sequences(rows), [[index] for index in range(len(rows))], cost)


def lay_lines(rows: Sequence[Row], cost: Cost) -> Iterator[Sheet]:
    """Each call in the row of one that goes on from it exactly, where there is one."""
    sequences = _sequences(rows)
    return _lines(rows, sequences, lines(sequences), cost)


def lay_trees(rows: Sequence[Row], cost: Cost) -> Iterator[Sheet]:
    """Rows as prefix trees, those of like size side by side: for attention by a dense mask."""
    plan = _plan(rows, cost)
    if isinstance(plan, Iterator):
        yield from plan
        return
    for batch in _batches([len(tree.ids) for _, tree in plan], cost.most):
        yield _trees(rows, [plan[number] for number in batch], len(plan[batch[0]][1].ids))


def lay_forests(rows: Sequence[Row], cost: Cost) -> Iterator[Sheet]:
    """Rows as prefix trees, one behind the other in a single line: for attention that skips what is masked."""
    plan = _plan(rows, cost)
    if isinstance(plan, Iterator):
        yield from plan
        return
    for part, tree in plan:
        yield _trees(rows, [(part, tree)], -(-len(tree.ids) // _BLOCK) * _BLOCK)


def _sequences(rows: Sequence[Row]) -> list[Ints]:
    return [np.array((*row.prompt_ids, *row.completion_ids), dtype=np.int64) for row in rows]


def _plan(rows: Sequence[Row], cost: Cost) -> list[tuple[list[int], Tree]] | Iterator[Sheet]:
    """Rows in trees, or, where they share too little for that to be worth it, laid in lines."""
    sequences = _sequences(rows)
    trees = [(part, grow([sequences[index] for index in part])) for part in pack(sequences, cost)]
    homes = lines(sequences)
    as_lines = sum(cost.of_line(len(sequences[first])) for first, *_ in homes)
    as_trees = sum(cost.of_tree(len(tree.ids)) for _, tree in trees)
    return _lines(rows, sequences, homes, cost) if as_lines <= as_trees else trees


def _lines(rows: Sequence[Row], sequences: Sequence[Ints], homes: Sequence[list[int]], cost: Cost) -> Iterator[Sheet]:
    """Rows in lines, of which the first of each home is the whole."""
    wholes = [sequences[home[0]] for home in homes]
    for batch in _batches([len(whole) for whole in wholes], cost.most):
        width = len(wholes[batch[0]])
        ids = np.zeros((len(batch), width), dtype=np.int64)
        order: list[int] = []
        paths: list[Ints] = []
        for line, number in enumerate(batch):
            ids[line, : len(wholes[number])] = wholes[number]
            order += homes[number]
            paths += [np.arange(line * width, line * width + len(sequences[index])) for index in homes[number]]
        yield _sheet(rows, order, paths, ids, None, None, sum(len(wholes[number]) for number in batch))


def _trees(rows: Sequence[Row], trees: Sequence[tuple[list[int], Tree]], width: int) -> Sheet:
    ids, depths = np.zeros((2, len(trees), width), dtype=np.int64)
    ends = np.tile(np.arange(1, width + 1), (len(trees), 1))  # padding sees itself, and nobody sees padding
    order: list[int] = []
    paths: list[Ints] = []
    for line, (part, tree) in enumerate(trees):
        ids[line, : len(tree.ids)] = tree.ids
        depths[line, : len(tree.ids)] = tree.depths
        ends[line, : len(tree.ids)] = tree.ends
        order += part
        paths += [line * width + path for path in tree.paths]
    return _sheet(rows, order, paths, ids, depths, ends, sum(len(tree.ids) for _, tree in trees))


def _sheet(
    rows: Sequence[Row],
    order: list[int],
    paths: Sequence[Ints],
    ids: Ints,
    depths: Ints | None,
    ends: Ints | None,
    computed: int,
) -> Sheet:
    """A sheet from where each of its rows lies. A token that rows share is one, unless they drew it differently."""
    some = [rows[index] for index in order]
    starts = [len(row.prompt_ids) for row in some]
    nodes = np.concatenate([path[start:] for path, start in zip(paths, starts, strict=True)])
    predictors = np.concatenate([path[start - 1 : -1] for path, start in zip(paths, starts, strict=True)])
    lengths = [len(row.completion_ids) for row in some]
    temperatures = np.repeat(np.array([row.temperature for row in some], dtype=np.float64), lengths)
    _, kinds = np.unique(temperatures, return_inverse=True)
    _, first, gather = np.unique(nodes * (int(kinds.max()) + 1) + kinds, return_index=True, return_inverse=True)
    return Sheet(
        rows=order,
        ids=torch.from_numpy(ids),
        depths=None if depths is None else torch.from_numpy(depths),
        ends=None if ends is None else torch.from_numpy(ends),
        predictors=torch.from_numpy(predictors[first]),
        targets=torch.from_numpy(ids.reshape(-1)[nodes[first]]),
        temperatures=torch.from_numpy(temperatures[first]),
        gather=torch.from_numpy(gather),
        states=torch.tensor([int(path[start - 1]) for path, start in zip(paths, starts, strict=True)]),
        computed=computed,
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
