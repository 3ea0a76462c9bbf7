"""HTTP with a limit on what may come before a request is known: uvicorn's fast parser has none of its own."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LARGEST_HEAD = 128 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Hangs up on a caller whose request line and headers do not end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head, self._head = True, 0

    def data_received(self, data: bytes) -> None:
        """Count what comes until the headers are complete."""
        self._head += len(data) if self._in_head else 0
        super().data_received(data)
        if self._head > _LARGEST_HEAD and not self.transport.is_closing():
            self.send_400_response("The headers are too large.")

    def on_headers_complete(self) -> None:
        """From here on the limit on bodies holds."""
        self._in_head, self._head = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Another request may follow."""
        self._in_head = True
        super().on_message_complete()
