"""Errors of the gateway. Each dialect writes them in the format that its SDK reads."""

from enum import StrEnum


class ErrorKind(StrEnum):
    """The kinds of error."""

    INVALID = "invalid_request"
    TOO_LONG = "context_length_exceeded"
    NO_MODEL = "model_not_found"
    NO_RESPONSE = "previous_response_not_found"
    NOT_FOUND = "not_found"
    BAD_KEY = "invalid_api_key"
    FORBIDDEN = "permission_denied"
    RATE_LIMITED = "rate_limit_exceeded"
    BUDGET_EXCEEDED = "budget_exceeded"
    FAILED = "server_error"


STATUS: dict[ErrorKind, int] = {
    ErrorKind.INVALID: 400,
    ErrorKind.TOO_LONG: 400,
    ErrorKind.NO_RESPONSE: 400,  # as OpenAI's service answers; clients send the whole conversation then
    ErrorKind.BAD_KEY: 401,
    ErrorKind.FORBIDDEN: 403,
    ErrorKind.BUDGET_EXCEEDED: 403,  # not 429, which SDKs retry
    ErrorKind.NO_MODEL: 404,
    ErrorKind.NOT_FOUND: 404,
    ErrorKind.RATE_LIMITED: 429,
    ErrorKind.FAILED: 503,
}


_INFRASTRUCTURE = frozenset({ErrorKind.RATE_LIMITED, ErrorKind.FAILED})


class GatewayError(Exception):
    """A model call that cannot be answered; `param` names the field to change."""

    def __init__(
        self, kind: ErrorKind, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.message, self.param, self.retry_after = kind, message, param, retry_after

    @property
    def text(self) -> str:
        """The message, after the field to change."""
        return f"{self.param}: {self.message}" if self.param else self.message

    @property
    def is_infrastructure(self) -> bool:
        """Whether the engine, its queue, an upstream or the store failed: nothing is wrong with the call."""
        return self.kind in _INFRASTRUCTURE


def invalid(message: str, param: str | None = None) -> GatewayError:
    """Return the error for a request that cannot be honoured; `param` names the field to change."""
    return GatewayError(ErrorKind.INVALID, message, param)


def no_model(name: str) -> GatewayError:
    """Return the error for a model name that nothing serves."""
    return GatewayError(ErrorKind.NO_MODEL, f"no model {name!r} is served here", "model")
