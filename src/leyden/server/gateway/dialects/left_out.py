"""Parts of a content that are not text, which the models here do not take.

In a tool's result a text stands in their place, so that an agent whose tool returned a picture can go on; the record
says what was left out. Anywhere else they are refused.
"""

from typing import Any

from leyden.server.gateway.errors import invalid

LEFT_OUT = "left_out"
"""The key of a tool's message for the types of the parts that are not shown to the model."""
_TEXT = frozenset({"text", "input_text", "output_text", "refusal", "tool_reference"})


def stand_in(part: Any, field: str, left_out: list[str] | None) -> str:
    """Return the text that stands in place of a part, and note its type; raise if `left_out` is None."""
    kind = part.get("type") if isinstance(part, dict) else None
    if left_out is None or not isinstance(kind, str) or kind in _TEXT:
        raise invalid(f"parts of type {kind!r} are not supported: this model takes text", field)
    left_out.append(kind)
    return f"[{kind.removeprefix('input_').removesuffix('_url')} left out: this model takes text only]"
