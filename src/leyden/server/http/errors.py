"""Errors of the API: their HTTP status and body, and which exception becomes which error."""

from collections.abc import Sequence

import msgspec

from leyden.server.control.keys import KeyRefused
from leyden.server.gateway.errors import STATUS, GatewayError
from leyden.server.http.limits import RateLimited
from leyden.store.errors import Conflict, NotFound, NotStorable, StoreUnavailable


class ApiError(Exception):
    """An error response: what is wrong, and in which field."""

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        field: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.message, self.field, self.headers = status, reason, message, field, headers


class ErrorDetail(msgspec.Struct, frozen=True, omit_defaults=True):
    """The error."""

    type: str
    message: str
    field: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error."""

    error: ErrorDetail


def api_error(error: Exception) -> ApiError:
    """Convert any exception of a handler to the error that the client receives."""
    match error:
        case GatewayError():
            wait = [("retry-after", str(max(1, round(error.retry_after))))] if error.retry_after else []
            return ApiError(STATUS[error.kind], str(error.kind), error.message, error.param, wait)
        case ApiError():
            return error
        case KeyRefused():
            challenge = [("www-authenticate", "Bearer")] if error.status == 401 else []
            return ApiError(error.status, error.reason, error.message, headers=challenge)
        case RateLimited():
            wait = [("retry-after", str(max(1, round(error.retry_after))))]
            return ApiError(429, "rate_limit", f"{error}: retry in {error.retry_after:.3g} s", headers=wait)
        case NotFound():
            return ApiError(404, "not_found", str(error))
        case Conflict():
            return ApiError(409, "conflict", str(error))
        case NotStorable():
            return ApiError(400, "invalid_request", str(error))
        case StoreUnavailable():
            return ApiError(503, "store_unavailable", str(error), headers=[("retry-after", "1")])
        case _:
            return ApiError(500, "server_error", "the server failed: see its log")
