"""Chat templates as transformers runs them: untrusted Jinja in a sandbox, same filters, same white space.

What a template writes here is, character for character, what `apply_chat_template` writes for the deployed model.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["TemplateError", "render"]


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The text of a conversation; `TemplateError` where the template refuses it or is not a template."""
    try:
        return _compiled(template).render(messages=list(messages), **variables)
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        # A template that adds text to None or to a list fails in Python, not in Jinja.
        raise TemplateError(f"{type(error).__name__}: {error}") from error


class _Generation(Extension):
    """`{% generation %}` only marks what an assistant wrote: its body is rendered as if the tag were not there."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=32)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML and sorts keys; this one does neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
