"""Computes logprobs without holding all logits: in chunks of tokens, recomputed in the backward pass.

The gradient of a chunk's logits is computed here rather than by autograd, which would keep several tensors of
the size of the logits. On a GPU the element-wise parts are compiled, so that each reads the logits once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_CPU_CHUNK_LOGITS, _GPU_CHUNK_LOGITS = 2**26, 2**28
"""Logits of one chunk. A larger chunk computes faster and takes more memory: 1 GiB in single precision on a GPU."""


Head = Callable[[Tensor], Tensor]
"""From hidden states to logits."""


def logprobs(
    head: Head, hidden: Tensor, targets: Tensor, temperatures: Tensor, vocabulary: int, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute the logprob of each target and the entropy of its distribution, in single precision or better.

    The entropy has a gradient only with `entropy_gradient`. Gradients of the head's parameters are added to their
    `grad` when the result is differentiated, as by `backward`.
    """
    most = _GPU_CHUNK_LOGITS if hidden.is_cuda else _CPU_CHUNK_LOGITS
    tokens = max(1, most // vocabulary)
    keep_logits = len(targets) <= tokens
    chunks = [
        _chunk_logprobs(*chunk, head, keep_logits)
        for chunk in zip(hidden.split(tokens), *(_split(each, tokens) for each in (targets, temperatures)), strict=True)
    ]
    entropies = torch.cat([entropy for _, entropy in chunks])
    return torch.cat([logprob for logprob, _ in chunks]), entropies if entropy_gradient else entropies.detach()


class _ChunkLogprobs(torch.autograd.Function):
    """Logprobs and entropies of some tokens. Keeps their hidden states, and their logits only with `keep_logits`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, targets: Tensor, temperatures: Tensor, head: Head, keep_logits: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the logprob of each target, and the entropy."""
        keep_logits = keep_logits and ctx.needs_input_grad[0]
        inner, logits = _apply(head, hidden) if keep_logits else (None, head(hidden))
        logprob, entropy, normaliser = _compiled(_statistics, hidden)(logits.detach(), targets, temperatures)
        ctx.save_for_backward(hidden, targets, temperatures, entropy, normaliser)
        ctx.head, ctx.kept = head, (inner, logits) if keep_logits else None
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the logits again unless they were kept; pass their gradient on to head and hidden states."""
        hidden, targets, temperatures, entropy, normaliser = ctx.saved_tensors
        inner, logits = ctx.kept or _apply(ctx.head, hidden)
        ctx.kept = None  # the caller may hold the graph while it computes the next one
        of_logits = _compiled(_logits_gradient, hidden)(
            logits.detach(), targets, temperatures, entropy, normaliser, *(each.clone() for each in gradients)
        )
        logits.backward(of_logits)
        return inner.grad, None, None, None, None


_chunk_logprobs: Callable[..., tuple[Tensor, Tensor]] = _ChunkLogprobs.apply


def _split(tensor: Tensor, tokens: int) -> list[Tensor]:
    """Return copies of the parts: what is compiled for a view is compiled again for a view of another tensor."""
    return [part.clone() for part in tensor.split(tokens)]


def _apply(head: Head, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return detached hidden states and their logits, with a graph between the two."""
    with torch.enable_grad():
        inner = hidden.detach().requires_grad_()
        return inner, head(inner)


def _statistics(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprobs of the targets, the entropies, and the log of the sum of exponentials."""
    scores = _scores(logits, temperatures)
    normaliser = scores.logsumexp(-1)
    entropy = normaliser - ((scores - normaliser[:, None]).exp() * scores).sum(-1)
    return scores.gather(-1, targets[:, None])[:, 0] - normaliser, entropy, normaliser


def _logits_gradient(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    entropy: Tensor,
    normaliser: Tensor,
    of_logprob: Tensor,
    of_entropy: Tensor,
) -> Tensor:
    """Compute the gradient of the logits from the gradients of logprobs and entropies."""
    scores = _scores(logits, temperatures)
    probability = (scores - normaliser[:, None]).exp()
    mean = (normaliser - entropy)[:, None]
    gradient = -probability * (of_logprob[:, None] + of_entropy[:, None] * (scores - mean))
    chosen = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    gradient = torch.where(chosen, gradient + of_logprob[:, None], gradient)
    return (gradient / temperatures[:, None].to(gradient.dtype)).to(logits.dtype)


def _scores(logits: Tensor, temperatures: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits / temperatures[:, None].to(logits.dtype)


def _compiled(function: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    return _compile(function) if like.is_cuda else function


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
