"""The texts of tokens, and the tokens of a prompt with their logprobs, for callers that want those."""

from collections.abc import Sequence
from itertools import accumulate

from leyden.engine.protocol import TokenChunk
from leyden.server.gateway.dialects.types import PromptTokens, TokenInfo
from leyden.server.gateway.prompts.reasoning_tokens import TokenDecoder

_CONTEXT = 8
"""How many tokens before others decide how their first characters are decoded."""
_LONGEST_CHARACTER = 4
"""The most tokens over which the bytes of a character are spread."""


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
    starts = list(accumulate(map(len, token_texts(tokenizer, ids)), initial=0))
    added = starts.pop() - len(text)  # tokens that are not in the text, like the one that begins a sequence
    return PromptTokens(choice, text, tuple(tokens), tuple(max(0, start - added) for start in starts))


def token_texts(tokenizer: TokenDecoder, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. The bytes of one character may be spread over tokens: the last one shows it."""
    texts: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        text = text_after(tokenizer, ids[max(0, start - _LONGEST_CHARACTER) : start], ids[start:end])
        incomplete = text.endswith("\ufffd") and end - start < _LONGEST_CHARACTER and end < len(ids)
        texts.append("" if incomplete else text)
        start = start if incomplete else end
    return texts


def text_after(tokenizer: TokenDecoder, context: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of tokens that follow others: some tokenizers drop a space at the beginning."""
    before = context[-_CONTEXT:]
    return tokenizer.decode([*before, *ids])[len(tokenizer.decode(before)) :]
