"""What an exception of an agent says: was it the agent (and so, in the end, the model), or the machinery?

Only the machinery's failures are tried again, so they are recognised narrowly: an error of our own server, or no
connection to it. They are told by shape, since an agent may bring any HTTP client.
"""

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from leyden.outcomes import Ending, Outcome

_LONGEST = 4000
_FRAMES = 5
_HERE = str(Path(__file__).parents[1])
_NOT_THE_AGENTS = (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, "<frozen")
_UNREACHED = {"APIConnectionError", "NetworkError", "RemoteProtocolError", "ConnectTimeout", "ConnectionError"}
_OURS = {"server_error", "api_error", "overloaded_error", "rate_limit_error", "rate_limit_exceeded"}


def read_failure(error: BaseException, server: str) -> Outcome:
    """The outcome of an attempt whose agent raised this."""
    for link in _chain(error):
        if _of_machinery(link, server):
            return Outcome(Ending.ENGINE_ERROR, f"{type(link).__name__}: {link}"[:_LONGEST])
    return Outcome(Ending.AGENT_ERROR, describe(error))


def describe(error: BaseException) -> str:
    """An exception in few lines: what it says, then where in the agent's code it came from, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith(_HERE)]
    own = [f for f in outside if not f.filename.startswith(_NOT_THE_AGENTS)] or outside
    lines = [f"  in {f.name}, {f.filename}:{f.lineno}: {f.line}" for f in reversed(own[-_FRAMES:])]
    said = "".join(traceback.format_exception_only(error)).strip()
    return "\n".join([said[: _LONGEST // 2], *lines])[:_LONGEST].encode(errors="backslashreplace").decode()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception with all that led to it, or that it holds."""
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


def _of_machinery(error: BaseException, server: str) -> bool:
    if _place(_address(error)) != _place(server):
        return False
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and (status >= 500 or status == 429):
        return True
    if _error_type(getattr(error, "body", None)) in _OURS:  # in the middle of a stream
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return status is None and bool(names & _UNREACHED) and "APITimeoutError" not in names


def _address(error: BaseException) -> str:
    """Where the request went that failed; httpx raises where an error has none."""
    for owner in (error, getattr(error, "response", None)):
        try:
            return str(owner.request.url)  # type: ignore[union-attr]
        except (AttributeError, RuntimeError):
            continue
    return ""


def _place(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _error_type(body: Any) -> str | None:
    if not isinstance(body, dict):
        return None
    inner = body.get("error")
    kind = (inner if isinstance(inner, dict) else body).get("type")
    return kind if isinstance(kind, str) else None
