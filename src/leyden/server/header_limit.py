"""Limits the size of request headers, for which uvicorn's httptools parser has no limit."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_HEAD = 128 * 1024


class HeaderLimitProtocol(HttpToolsProtocol):
    """Answers 400 and closes the connection when request line and headers exceed 128 KiB."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head, self._head = True, 0

    def data_received(self, data: bytes) -> None:
        """Count the bytes until the headers are complete."""
        self._head += len(data) if self._in_head else 0
        super().data_received(data)
        if self._head > _MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The request headers are too large.")

    def on_headers_complete(self) -> None:
        """Stop counting: bodies have their own limit."""
        self._in_head, self._head = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Count again for the next request."""
        self._in_head = True
        super().on_message_complete()
