"""Logprobs without all logits: so many tokens at a time, and computed again where a gradient is wanted."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_LOGITS = 2**26
"""How many logits are there at once: 256 MiB of them in single precision."""


Head = Callable[[Tensor], Tensor]
"""From hidden states to logits."""


def logprobs(
    head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor, vocabulary: int, bonus: bool = False
) -> tuple[Tensor, Tensor]:
    """The logprob of each target, and the entropy that it was drawn with, in single precision at least.

    The entropy has a gradient where it is a `bonus`.
    """
    tokens = max(1, _LOGITS // vocabulary)
    again = torch.is_grad_enabled() and len(targets) > tokens
    parts = [
        checkpoint(_logprobs, head, *part, bonus, use_reentrant=False) if again else _logprobs(head, *part, bonus)
        for part in zip(hidden.split(tokens), targets.split(tokens), temperatures.split(tokens), strict=True)
    ]
    return torch.cat([logprob for logprob, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _logprobs(head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor, bonus: bool) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = torch.log_softmax(logits / temperatures[:, None].to(logits.dtype), -1)
    with torch.set_grad_enabled(bonus and torch.is_grad_enabled()):
        entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(-1, targets[:, None])[:, 0], entropy
