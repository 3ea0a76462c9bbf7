"""The dialects that the gateway serves. A new dialect is one new file and one line here."""

from leyden.server.gateway.dialects.base import Dialect
from leyden.server.gateway.dialects.chat.dialect import ChatDialect
from leyden.server.gateway.dialects.completions import CompletionsDialect
from leyden.server.gateway.dialects.google.dialect import GoogleDialect
from leyden.server.gateway.dialects.messages.dialect import AnthropicDialect
from leyden.server.gateway.dialects.responses.dialect import ResponsesDialect

GOOGLE: tuple[Dialect, ...] = (GoogleDialect("generateContent"), GoogleDialect("streamGenerateContent"))
DIALECTS: tuple[Dialect, ...] = (
    ChatDialect(),  # the first one writes the errors of paths that belong to no dialect
    AnthropicDialect(),
    ResponsesDialect(),
    CompletionsDialect(),
    *GOOGLE,
)
BASES: dict[str, tuple[Dialect, ...]] = {"/v1": DIALECTS, "/v1beta": GOOGLE}
"""The dialects by the beginning of their paths."""
