"""Describes the tokens of a prompt with their logprobs, for callers that want those beside the completion's."""

from collections.abc import Iterator, Sequence

from leyden.engine.protocol import TokenChunk
from leyden.server.gateway.dialects.types import PromptTokens, TokenInfo
from leyden.server.gateway.prompts.reasoning_tokens import TokenDecoder

_CONTEXT = 4
"""How many tokens before another one decide how it is decoded."""
_INCOMPLETE = "\ufffd"


def describe_prompt(
    tokenizer: TokenDecoder, choice: int, ids: Sequence[int], text: str, chunk: TokenChunk
) -> PromptTokens:
    """Describe a prompt with this text, for which the engine sent this chunk. The first token has no logprob."""
    logprobs: list[float | None] = [None, *chunk.prompt_logprobs]
    tops: list[Sequence[tuple[int, float]]] = [(), *(chunk.prompt_top or ((),) * len(chunk.prompt_logprobs))]
    known: dict[int, tuple[str, bytes]] = {}

    def written(id: int) -> tuple[str, bytes]:
        if id not in known:
            known[id] = tokenizer.decode([id]), tokenizer.token_bytes(id)
        return known[id]

    tokens = []
    for id, logprob, top in zip(ids, logprobs, tops, strict=True):
        alternatives = tuple((*written(one), value) for one, value in top)
        tokens.append(TokenInfo(*written(id), logprob, alternatives, id))
    starts = list(_starts(tokenizer, ids))
    added = starts.pop() - len(text)  # tokens that are not in the text, like the one that begins a sequence
    return PromptTokens(choice, text, tuple(tokens), tuple(max(0, start - added) for start in starts))


def _starts(tokenizer: TokenDecoder, ids: Sequence[int]) -> Iterator[int]:
    """Yield where the text of each token begins, and where the text ends.

    The tokens of one character begin where the character does.
    """
    length, done = 0, 0
    for at in range(1, len(ids) + 1):
        yield length
        before = ids[max(0, done - _CONTEXT) : done]
        text = tokenizer.decode([*before, *ids[done:at]])[len(tokenizer.decode(before)) :]
        if not text.endswith(_INCOMPLETE) or at - done >= _CONTEXT or at == len(ids):
            length, done = length + len(text), at
    yield length
