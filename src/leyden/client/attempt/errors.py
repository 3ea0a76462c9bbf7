"""Classifies exceptions raised by agents: failures of the agent, or of the infrastructure.

Only infrastructure failures are retried, so they are recognised narrowly: an error reply of our own server, or no
connection to it. They are recognised by attributes and class names, because an agent may use any HTTP client.
"""

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leyden.client.server_origin import ServerOrigin
from leyden.outcomes import Ending, Outcome

_MAX_LENGTH = 4000
_MAX_FRAMES = 5
_CALLERS = tuple(str(Path(__file__).parents[2] / package) for package in ("client", "user_code"))
"""What calls the code of users."""
_LIBRARY_PATHS = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, "<frozen")
_CONNECTION_ERRORS = {"APIConnectionError", "NetworkError", "RemoteProtocolError", "ConnectTimeout", "ConnectionError"}
_LOOP_ERRORS = (
    "is bound to a different event loop",
    "attached to a different loop",
    "Event loop is closed",
    "This event loop is already running",
)
_SERVER_ERROR_TYPES = {"server_error", "api_error", "overloaded_error", "rate_limit_error", "rate_limit_exceeded"}


def outcome_of_error(error: BaseException, server: str) -> Outcome:
    """Return the outcome of an attempt whose agent raised this exception."""
    origin = ServerOrigin(server)
    for link in _chain(error):
        if _is_infrastructure(link, origin):
            return Outcome(Ending.ENGINE_ERROR, f"{type(link).__name__}: {link}"[:_MAX_LENGTH])
    return Outcome(Ending.AGENT_ERROR, describe(error))


def describe(error: BaseException) -> str:
    """Format an exception in a few lines: its message, then the frames of the agent's code, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith(_CALLERS)]
    own = [f for f in outside if not f.filename.startswith(_LIBRARY_PATHS)] or outside
    lines = [f"  in {f.name}, {f.filename}:{f.lineno}: {f.line}" for f in reversed(own[-_MAX_FRAMES:])]
    message = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([message[: _MAX_LENGTH // 2], *lines])[:_MAX_LENGTH].encode(errors="backslashreplace").decode()


def is_loop_error(error: BaseException) -> bool:
    """Whether something was used in two event loops, such as a client that several threads share."""
    return any(
        isinstance(link, RuntimeError) and any(words in str(link) for words in _LOOP_ERRORS) for link in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception with its causes, contexts and the members of exception groups."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [link.__context__, link.__cause__]
        if isinstance(link, BaseExceptionGroup):
            todo += link.exceptions


def _is_infrastructure(error: BaseException, server: ServerOrigin) -> bool:
    if not server.matches_url(_request_url(error)):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and (status >= 500 or status == 429):
        return True
    if _error_type(getattr(error, "body", None)) in _SERVER_ERROR_TYPES:  # an error event within a stream
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return status is None and bool(names & _CONNECTION_ERRORS) and "APITimeoutError" not in names


def _request_url(error: BaseException) -> str:
    """Return the URL of the failed request, or an empty string. httpx raises if an error has no request."""
    owners: tuple[Any, ...] = (error, getattr(error, "response", None))
    for owner in owners:
        try:
            return str(owner.request.url)
        except (AttributeError, RuntimeError):
            continue
    return ""


def _error_type(body: Any) -> str | None:
    if not isinstance(body, dict):
        return None
    inner = body.get("error")
    kind = (inner if isinstance(inner, dict) else body).get("type")
    return kind if isinstance(kind, str) else None
