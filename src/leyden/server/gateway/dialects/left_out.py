"""Parts of a content that are not text, which the models here do not take.

In a tool's result a text stands in their place, so that an agent whose tool returned a picture can go on; the record
says what was left out. Anywhere else they are refused.
"""

from typing import Any

from leyden.server.gateway.dialects.types import Message
from leyden.server.gateway.errors import invalid

LEFT_OUT = "left_out"
"""The key of a tool's message for the types of the parts that are not shown to the model."""
_TEXT_FIELDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The field of a part that has its text, by the type of the part."""
_TEXT = frozenset({*_TEXT_FIELDS, "tool_reference"})


def stand_in(part: Any, field: str, left_out: list[str] | None) -> str:
    """Return the text that stands in place of a part, and note its type; raise if `left_out` is None."""
    kind = part.get("type") if isinstance(part, dict) else None
    if left_out is None or not isinstance(kind, str) or kind in _TEXT:
        raise invalid(f"parts of type {kind!r} are not supported: this model takes text", field)
    left_out.append(kind)
    return f"[{kind.removeprefix('input_').removesuffix('_url')} left out: this model takes text only]"


def text_of(content: Any, field: str, left_out: list[str] | None = None) -> str:
    """Join the parts of a content. A text stands in place of parts that are not text if `left_out` collects those."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("this is text, or a list of parts", field)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXT_FIELDS.get(kind, "")) if isinstance(kind, str) else None
        texts.append(text if isinstance(text, str) else stand_in(part, f"{field}[{index}].type", left_out))
    return "".join(texts)


def tool_result(content: Any, field: str) -> Message:
    """Return the fields of a tool's message for what it returned."""
    left_out: list[str] = []
    text = text_of(content, field, left_out)
    return {"content": text, LEFT_OUT: left_out} if left_out else {"content": text}
