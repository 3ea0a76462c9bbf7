"""The dialects that the gateway serves. A new dialect is one new file and one line here."""

from leyden.server.gateway.dialects.base import Dialect
from leyden.server.gateway.dialects.chat.dialect import CHAT
from leyden.server.gateway.dialects.completions import COMPLETIONS
from leyden.server.gateway.dialects.google.dialect import GOOGLE
from leyden.server.gateway.dialects.messages.dialect import MESSAGES
from leyden.server.gateway.dialects.responses.dialect import RESPONSES

# The first one writes the errors of paths that belong to no dialect.
DIALECTS: tuple[Dialect, ...] = (CHAT, MESSAGES, RESPONSES, COMPLETIONS, *GOOGLE)
BASES: dict[str, tuple[Dialect, ...]] = {"/v1": DIALECTS, "/v1beta": GOOGLE}
"""The dialects by the beginning of their paths."""
