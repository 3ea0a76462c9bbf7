"""The dialects that the gateway serves. A new dialect is one new file and one line here."""

from leyden.server.gateway.dialects.base import Dialect
from leyden.server.gateway.dialects.chat.dialect import ChatDialect
from leyden.server.gateway.dialects.completions import CompletionsDialect
from leyden.server.gateway.dialects.messages.dialect import AnthropicDialect
from leyden.server.gateway.dialects.responses.dialect import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (
    ChatDialect(),  # the first one writes the errors of paths that belong to no dialect
    AnthropicDialect(),
    ResponsesDialect(),
    CompletionsDialect(),
)
