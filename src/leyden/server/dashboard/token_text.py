"""Finds the tokenizer of a policy and gives every token its part of the text."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from leyden.rendering.tokenizer import Tokenizer, TokenizerError
from leyden.runs.checkpoint_folders import latest_checkpoint
from leyden.server.service import ServerContext


def tokenizer_of(service: ServerContext, policy: str, folder: Path | None = None) -> Tokenizer | None:
    """Return the tokenizer of a served policy, or of its newest checkpoint in a run's folder (default: the home)."""
    if folder is None and service.gateway is not None and policy in service.gateway.models:
        return service.gateway.models[policy].tokenizer
    home = folder or service.settings.home
    checkpoint = latest_checkpoint(home, policy) if home is not None else None
    return _load(checkpoint / "tokenizer.json") if checkpoint is not None else None


@lru_cache(maxsize=8)  # every checkpoint has its own file
def _load(path: Path) -> Tokenizer | None:
    try:
        return Tokenizer.load(path)
    except TokenizerError:
        return None


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token. The bytes of one character may be spread over tokens: the last one shows it."""
    texts: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        context = ids[max(0, start - 1) : start]  # the first token of a text loses its leading space with some models
        text = tokenizer.decode([*context, *ids[start:end]])[len(tokenizer.decode(context)) :]
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            texts.append("")
        else:
            texts.append(text)
            start = end
    return texts
