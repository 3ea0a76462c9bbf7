"""Computes logprobs without holding all logits: in chunks of tokens, recomputed in the backward pass."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_LOGITS = 2**26
"""Logits of one chunk: 256 MiB in single precision."""


Head = Callable[[Tensor], Tensor]
"""From hidden states to logits."""


def logprobs(
    head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor, vocabulary: int, bonus: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the logprob of each target and the entropy of its distribution, in single precision or better.

    `bonus`: whether the entropy has a gradient.
    """
    tokens = max(1, _CHUNK_LOGITS // vocabulary)
    recompute = torch.is_grad_enabled() and len(targets) > tokens
    chunks = [
        checkpoint(_logprobs, head, *chunk, bonus, use_reentrant=False) if recompute else _logprobs(head, *chunk, bonus)
        for chunk in zip(hidden.split(tokens), targets.split(tokens), temperatures.split(tokens), strict=True)
    ]
    return torch.cat([logprob for logprob, _ in chunks]), torch.cat([entropy for _, entropy in chunks])


def _logprobs(head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor, bonus: bool) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = torch.log_softmax(logits / temperatures[:, None].to(logits.dtype), -1)
    with torch.set_grad_enabled(bonus and torch.is_grad_enabled()):
        entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(-1, targets[:, None])[:, 0], entropy
