"""Writes errors as OpenAI's SDKs read them; shared by the dialects of OpenAI's API."""

import msgspec

from leyden.server.gateway.errors import STATUS, GatewayError

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def openai_error(error: GatewayError) -> bytes:
    """Return the JSON body of an error response."""
    status = STATUS[error.kind]
    kind = "rate_limit_error" if status == 429 else _TYPES.get(status, "server_error")
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": kind, "param": error.param, "code": str(error.kind)}}
    )
