"""How rows lie in a batch: as the prefix tree of their tokens, each distinct one computed once, or in plain lines.

Either way each row knows where the predictors of its completion are, so that every loss stays the textbook one.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from leyden.rl.pack import Cost, lines, pack
from leyden.rl.tree import Ints, grow
from leyden.trainer.batch.samples import Sample


class TreeNodes(Struct, frozen=True):
    """The tokens of a sheet as the nodes of trees."""

    depths: Ints
    """The position of each."""
    ends: Ints
    """Where the descendants of each stop."""
    paths: Sequence[Ints]
    """Of each row on the sheet."""
    kept: Sequence[int]
    """How many nodes of each path belong to another row's."""


class MicroBatch(Struct, frozen=True):
    """A batch of sequences, padded to the right, and the sampled tokens whose logprobs are wanted of it."""

    rows: list[int]
    """Which rows lie on it; their tokens follow each other in this order."""
    ids: Tensor
    nodes: TreeNodes | None
    """Who sees whom; None: each token sees those before it in its line."""
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


def lay_rows(rows: Sequence[Sample], cost: Cost) -> Iterator[MicroBatch]:
    """One row a call."""
    return _lines(rows, _sequences(rows), [[index] for index in range(len(rows))], cost)


def lay_lines(rows: Sequence[Sample], cost: Cost) -> Iterator[MicroBatch]:
    """Each call in the row of one that goes on from it exactly, where there is one."""
    sequences = _sequences(rows)
    return _lines(rows, sequences, lines(sequences), cost)


def lay_trees(rows: Sequence[Sample], cost: Cost) -> Iterator[MicroBatch]:
    """Rows as prefix trees, one behind the other; in lines where they share too little for that to be worth it."""
    sequences = _sequences(rows)
    parts, homes = pack(sequences, cost), lines(sequences)
    if sum(len(sequences[first]) for first, *_ in homes) <= cost.tree * sum(part.tokens for part in parts):
        yield from _lines(rows, sequences, homes, cost)
        return
    for part in parts:
        tree = grow([sequences[index] for index in part.indices])
        width = -(-len(tree.ids) // cost.block) * cost.block
        ids, depths = np.zeros((2, 1, width), dtype=np.int64)
        ends = np.arange(1, width + 1)[None]  # padding sees itself, and nobody sees padding
        for array, own in (ids, tree.ids), (depths, tree.depths), (ends, tree.ends):
            array[0, : len(own)] = own
        yield _sheet(rows, part.indices, tree.paths, ids, TreeNodes(depths, ends, tree.paths, tree.kept), len(tree.ids))


def _sequences(rows: Sequence[Sample]) -> list[Ints]:
    return [np.array((*row.prompt_ids, *row.completion_ids), dtype=np.int64) for row in rows]


def _lines(
    rows: Sequence[Sample], sequences: Sequence[Ints], homes: Sequence[list[int]], cost: Cost
) -> Iterator[MicroBatch]:
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
        yield _sheet(rows, order, paths, ids, None, sum(len(wholes[number]) for number in batch))


def _sheet(
    rows: Sequence[Sample],
    order: list[int],
    paths: Sequence[Ints],
    ids: Ints,
    nodes: TreeNodes | None,
    computed: int,
) -> MicroBatch:
    """A sheet from where each of its rows lies. A token that rows share is one, unless they drew it differently."""
    some = [rows[index] for index in order]
    starts = [len(row.prompt_ids) for row in some]
    places = [start + np.array(row.chosen) for start, row in zip(starts, some, strict=True)]
    sampled = np.concatenate([path[place] for path, place in zip(paths, places, strict=True)])
    predictors = np.concatenate([path[place - 1] for path, place in zip(paths, places, strict=True)])
    lengths = [len(row.chosen) for row in some]
    temperatures = np.repeat(np.array([row.temperature for row in some], dtype=np.float64), lengths)
    _, kinds = np.unique(temperatures, return_inverse=True)
    _, first, gather = np.unique(sampled * (int(kinds.max()) + 1) + kinds, return_index=True, return_inverse=True)
    return MicroBatch(
        rows=order,
        ids=torch.from_numpy(ids),
        nodes=nodes,
        predictors=torch.from_numpy(predictors[first]),
        targets=torch.from_numpy(ids.reshape(-1)[sampled[first]]),
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
