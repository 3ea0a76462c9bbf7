"""Writes errors as Anthropic's SDKs read them."""

from typing import Any

import msgspec

from leyden.server.gateway.errors import STATUS, ErrorKind, GatewayError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def anthropic_error(error: GatewayError) -> bytes:
    """Write an error response. The format has no field for the parameter: the message names it.

    A client that sent `thread` gets the code that makes its SDK continue without threads.
    """
    kind = _TYPES.get(STATUS[error.kind], "overloaded_error" if error.retry_after else "api_error")
    message = f"{error.param}: {error.message}" if error.param else error.message
    if error.kind is ErrorKind.TOO_LONG:  # agents look for these words
        message = f"prompt is too long: {error.message}"
    body: dict[str, Any] = {"type": kind, "message": message}
    if error.param == "thread":
        body["details"] = {"error_code": "thread_unsupported_request", "unsupported": []}
    return msgspec.json.encode({"type": "error", "error": body})
