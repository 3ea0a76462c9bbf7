"""Lays samples out in micro-batches: as prefix trees, where each distinct token is computed once, or as sequences.

In both layouts the logprobs of each sample's tokens are gathered for the sample, so losses do not depend on the layout.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from leyden.learner.sample import Sample
from leyden.rl.pack import Cost, merge_prefixes, pack
from leyden.rl.tree import Ints, build_tree


class TreeNodes(Struct, frozen=True):
    """The tokens of a micro-batch as the nodes of trees."""

    depths: Ints
    """The position of each node."""
    ends: Ints
    """Where the descendants of each node end."""
    paths: Sequence[Ints]
    """The nodes of each sample of the micro-batch."""
    kept: Sequence[int]
    """How many nodes of each path are shared with an earlier sample."""


class MicroBatch(Struct, frozen=True):
    """A batch of sequences, padded on the right, and the sampled tokens whose logprobs are computed."""

    samples: list[int]
    """Indices of its samples; their tokens follow each other in this order."""
    ids: Tensor
    nodes: TreeNodes | None
    """The tree that attention follows; None: each token attends to those before it in its sequence."""
    predictors: Tensor
    """For every distinct sampled token, the index of its predictor in the flattened batch."""
    targets: Tensor
    temperatures: Tensor
    gather: Tensor
    """For every sampled token of every sample, its index among the distinct ones."""
    states: Tensor
    """For every sample, the index in the flattened batch of the last token of its prompt."""
    computed: int
    """Tokens without padding."""


def sequence_microbatches(samples: Sequence[Sample], cost: Cost) -> Iterator[MicroBatch]:
    """Lay out one sequence for each sample."""
    return _lines(samples, _sequences(samples), [[index] for index in range(len(samples))], cost)


def tree_microbatches(samples: Sequence[Sample], cost: Cost) -> Iterator[MicroBatch]:
    """Lay out prefix trees; sequences if the samples share too little for trees to be faster."""
    sequences = _sequences(samples)
    parts, lines = pack(sequences, cost), merge_prefixes(sequences)
    if sum(len(sequences[first]) for first, *_ in lines) <= cost.tree_token * sum(part.tokens for part in parts):
        yield from _lines(samples, sequences, lines, cost)
        return
    for part in parts:
        tree = build_tree([sequences[index] for index in part.indices])
        width = -(-len(tree.ids) // cost.block) * cost.block
        ids, depths = np.zeros((2, 1, width), dtype=np.int64)
        ends = np.arange(1, width + 1)[None]  # padding attends to itself, and nothing attends to padding
        for array, own in (ids, tree.ids), (depths, tree.depths), (ends, tree.ends):
            array[0, : len(own)] = own
        yield _microbatch(
            samples, part.indices, tree.paths, ids, TreeNodes(depths, ends, tree.paths, tree.kept), len(tree.ids)
        )


def _sequences(samples: Sequence[Sample]) -> list[Ints]:
    return [np.array((*sample.prompt_ids, *sample.completion_ids), dtype=np.int64) for sample in samples]


def _lines(
    samples: Sequence[Sample], sequences: Sequence[Ints], lines: Sequence[list[int]], cost: Cost
) -> Iterator[MicroBatch]:
    """Lay out one sequence for each line of samples; the first of a line contains the others as prefixes."""
    wholes = [sequences[line[0]] for line in lines]
    for batch in _batches([len(whole) for whole in wholes], cost.max_tokens):
        width = len(wholes[batch[0]])
        ids = np.zeros((len(batch), width), dtype=np.int64)
        order: list[int] = []
        paths: list[Ints] = []
        for line, number in enumerate(batch):
            ids[line, : len(wholes[number])] = wholes[number]
            order += lines[number]
            paths += [np.arange(line * width, line * width + len(sequences[index])) for index in lines[number]]
        yield _microbatch(samples, order, paths, ids, None, sum(len(wholes[number]) for number in batch))


def _microbatch(
    samples: Sequence[Sample],
    order: list[int],
    paths: Sequence[Ints],
    ids: Ints,
    nodes: TreeNodes | None,
    computed: int,
) -> MicroBatch:
    """Build a micro-batch from the path of each sample. Samples share a token unless their temperatures differ."""
    some = [samples[index] for index in order]
    starts = [len(sample.prompt_ids) for sample in some]
    indices = [start + np.array(sample.token_indices) for start, sample in zip(starts, some, strict=True)]
    sampled = np.concatenate([path[index] for path, index in zip(paths, indices, strict=True)])
    predictors = np.concatenate([path[index - 1] for path, index in zip(paths, indices, strict=True)])
    lengths = [len(sample.token_indices) for sample in some]
    temperatures = np.repeat(np.array([sample.temperature for sample in some], dtype=np.float64), lengths)
    _, kinds = np.unique(temperatures, return_inverse=True)
    _, first, gather = np.unique(sampled * (int(kinds.max()) + 1) + kinds, return_index=True, return_inverse=True)
    return MicroBatch(
        samples=order,
        ids=torch.from_numpy(ids),
        nodes=nodes,
        predictors=torch.from_numpy(predictors[first]),
        targets=torch.from_numpy(ids.reshape(-1)[sampled[first]]),
        temperatures=torch.from_numpy(temperatures[first]),
        gather=torch.from_numpy(gather),
        states=torch.tensor([int(path[start - 1]) for path, start in zip(paths, starts, strict=True)]),
        computed=computed,
    )


def _batches(sizes: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Batch items of similar size, at most so many tokens each; the first of a batch is its largest."""
    batch: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        if batch and (len(batch) + 1) * sizes[batch[0]] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
