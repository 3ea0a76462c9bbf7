"""The prefix tree of a group: which tokens its calls share, and which of them the model sampled."""

from collections.abc import Callable, Sequence

from leyden.api.views import PrefixTree, TreeNode
from leyden.episodes import Episode

_TEXT_TOKENS = 24
Text = Callable[[Sequence[int]], str]


def prefix_tree(episodes: Sequence[Episode], text: Text) -> PrefixTree:
    """Build the tree of all sequences (prompt and completion) of the episodes' calls.

    A node is a run of tokens that the same calls share and that were all sampled, or all not.
    """
    sequences = sorted((sequence, index) for index, episode in enumerate(episodes) for sequence in _sequences(episode))
    nodes: list[TreeNode] = []
    _grow(nodes, sequences, 0, -1, text)
    total = sum(len(sequence) for sequence, _ in sequences)
    return PrefixTree(tuple(nodes), total, sum(node.tokens for node in nodes))


def _sequences(episode: Episode) -> list[tuple[int, ...]]:
    """Return each call's tokens as 2 * id, plus 1 if the token was sampled."""
    found: dict[str, tuple[int, ...]] = {}
    for call in episode.calls:
        kept = found[call.parent][: call.kept_ids] if call.parent is not None else ()
        new = (*(2 * id for id in call.prompt_ids), *(2 * id + 1 for id in call.completion_ids))
        found[call.id] = (*kept, *new)
    return list(found.values())


def _grow(
    nodes: list[TreeNode], sequences: Sequence[tuple[tuple[int, ...], int]], depth: int, parent: int, text: Text
) -> None:
    """Add the subtree of sorted sequences that agree up to a depth."""
    waiting = [(list(sequences), depth, parent)]
    while waiting:
        some, depth, parent = waiting.pop(0)
        for branch in _branches([one for one in some if len(one[0]) > depth], depth):
            first, last = branch[0][0], branch[-1][0]  # sorted: what these share, all share
            end = depth + 1
            shortest = min(len(one[0]) for one in branch)
            while end < shortest and first[end] == last[end] and first[end] % 2 == first[depth] % 2:
                end += 1
            rollouts = tuple(sorted({index for _, index in branch}))
            beginning = [token // 2 for token in first[depth : min(end, depth + _TEXT_TOKENS)]]
            nodes.append(TreeNode(parent, end - depth, bool(first[depth] % 2), len(branch), rollouts, text(beginning)))
            waiting.append((branch, end, len(nodes) - 1))


def _branches(sequences: Sequence[tuple[tuple[int, ...], int]], depth: int) -> list[list[tuple[tuple[int, ...], int]]]:
    branches: list[list[tuple[tuple[int, ...], int]]] = []
    for one in sequences:
        if branches and branches[-1][0][0][depth] == one[0][depth]:
            branches[-1].append(one)
        else:
            branches.append([one])
    return branches
