"""Finds the renderer of the `renderers` package that writes what a model's chat template writes.

The package knows models by name, and a folder has no such name. So the template decides: a model is rendered like a
known one whose renderer writes the same as the template on every probe. Checkpoints remember the name of a known model.
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from renderers import Renderer, create_renderer
from renderers.base import MODEL_RENDERER_MAP

from leyden.rendering.chat_template import TemplateError
from leyden.rendering.chatml_form import probes
from leyden.rendering.tokenizer import RENDERER_FILE, Tokenizer

_log = logging.getLogger(__name__)
Conversation = tuple[list[Any], list[Any] | None]
"""Messages and tools."""


def is_known(model: str) -> bool:
    """Return whether the package has a renderer for a model of this name."""
    return model in MODEL_RENDERER_MAP


def find_known_model(tokenizer: Tokenizer) -> str | None:
    """Return the known model whose renderer writes what a template writes; None if there is none.

    Of several it is the one of the tokenizer's own name, then the one that agrees on most unusual conversations.
    """
    own = tokenizer.name_or_path
    usual, unusual = _written(tokenizer, _PROBES), _written(tokenizer, probes(knows_tools=True))
    if is_known(own) and _agreement(tokenizer, usual, unusual) is not None:
        return own
    best, found = -1, None
    for model in MODEL_RENDERER_MAP:
        if best < len(unusual) and _may_be(model, tokenizer):
            agreement = _agreement(tokenizer.renamed(model), usual, unusual)
            if agreement is not None and agreement > best:
                best, found = agreement, model
    return found


def renderer_like(tokenizer: Tokenizer, model: str) -> Renderer:
    """Return the renderer of a known model, for this tokenizer."""
    return create_renderer(tokenizer.renamed(model))


def remember_known_model(folder: Path, model: str) -> None:
    """Write the name of a known model into a folder with its tokenizer, from which `Tokenizer.load` reads it.

    It is needed if the template does not decide. Any other model needs nothing: its files are in the folder.
    """
    if is_known(model):
        (folder / RENDERER_FILE).write_text(json.dumps({"model": model}) + "\n", encoding="utf-8")


def _may_be(model: str, tokenizer: Tokenizer) -> bool:
    """Return whether to try a model's renderer. That of gpt-oss downloads its vocabulary, so it needs a sign of it."""
    return MODEL_RENDERER_MAP[model] != "gpt-oss" or "<|channel|>" in tokenizer.control_tokens


def _written(tokenizer: Tokenizer, conversations: Sequence[Conversation]) -> list[tuple[Conversation, str]]:
    """Return what the template writes of each conversation that it does not refuse."""
    texts = []
    for messages, tools in conversations:
        with suppress(TemplateError):
            text = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, tokenize=False)
            texts.append(((messages, tools), text))
    return texts


def _agreement(
    tokenizer: Tokenizer, usual: Sequence[tuple[Conversation, str]], unusual: Sequence[tuple[Conversation, str]]
) -> int | None:
    """Return on how many unusual conversations the renderer of the tokenizer's name writes what the template writes.

    None if they differ on a conversation as agents have them, or if the template refuses all of those.
    """
    try:
        renderer = create_renderer(tokenizer)
    except Exception as error:  # of many kinds: mostly a token that the renderer needs is missing
        _log.debug("not rendered like %s: %s: %s", tokenizer.name_or_path, type(error).__name__, error)
        return None
    if not usual or not all(_writes(renderer, tokenizer, *one) for one in usual):
        return None
    return sum(_writes(renderer, tokenizer, *one) for one in unusual)


def _writes(renderer: Renderer, tokenizer: Tokenizer, conversation: Conversation, text: str) -> bool:
    messages, tools = conversation
    try:
        ids = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
    except Exception:  # the renderer refuses what the template takes
        return False
    return bool(tokenizer.decode(ids) == text)


_SYSTEM = {"role": "system", "content": "Be brief."}
_QUESTION = {"role": "user", "content": "How warm is it in Z\u00fcrich?"}
_ANSWER = {"role": "assistant", "content": "It is 21.5 degrees."}
_THOUGHT = {**_ANSWER, "reasoning_content": "The tool says so."}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Z\u00fcrich", "days": 2, "hours": [6, True]}},
}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"degrees": 21.5}'}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "hours": {"type": "array"}},
                "required": ["city"],
            },
        },
    }
]
_PROBES: list[Conversation] = [
    ([_QUESTION], None),
    ([_SYSTEM, _QUESTION], None),
    ([_SYSTEM, _QUESTION, _ANSWER, _QUESTION], None),
    ([_QUESTION, _THOUGHT, _QUESTION], None),
    ([_QUESTION], _TOOLS),
    ([_SYSTEM, _QUESTION, _CALLING, _RESULT], _TOOLS),
    ([_SYSTEM, _QUESTION, _CALLING, _RESULT, _ANSWER, _QUESTION], _TOOLS),
    ([_QUESTION, {**_CALLING, "reasoning_content": "I need the tool."}, _RESULT, _THOUGHT, _QUESTION], _TOOLS),
]
"""Conversations as agents have them. Renderers may differ from a template on others, such as two system messages."""
