"""Writes errors as Google's SDKs read them."""

from typing import Any

import msgspec

from leyden.server.gateway.errors import STATUS, GatewayError

_STATUS_NAMES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}


def google_error(error: GatewayError) -> bytes:
    """Write an error response. The format has no field for the parameter: the message names it."""
    code = STATUS[error.kind]
    message = f"{error.param}: {error.message}" if error.param else error.message
    body: dict[str, Any] = {"code": code, "message": message, "status": _STATUS_NAMES[code]}
    if error.retry_after is not None:
        retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{error.retry_after:g}s"}
        body["details"] = [retry]
    return msgspec.json.encode({"error": body})
