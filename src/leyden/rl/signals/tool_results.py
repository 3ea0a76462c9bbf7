"""Decides whether a tool call failed or succeeded, by its span and by the text of its result.

A span with an error, or a result that the agent marked as an error, is a failure. A span without an error outweighs a
text that only resembles one. If the text is certainly an error and the span has none, they contradict each other, and
there is no signal.

Only Anthropic's dialect can mark a result as an error, so frameworks write errors as text. Their sentences are listed
here, with two common forms (`Error: ...` and a JSON object with `error`). Precision is more important than recall: a
text that only resembles an error is neither a failure nor a success.
"""

import re
from typing import Any

import msgspec

from leyden.records import Span
from leyden.rl.signals.signal import Evidence, SignalKind
from leyden.rl.signals.tool_calls import ToolResult
from leyden.rl.signals.tool_spans import span_error

_TOOL = r"['\"`]?[\w.:/-]+['\"`]?"
_FAILED = re.compile(
    rf"""(?:
      Error:\s+ (?!(?i:none|null|nil|no|n/a)\W*(?:\n|\Z)|(?i:no\ errors?|none\ (?:found|detected))\b)
        (?!(?![45]\d\d\b)[-+±]?\.?\d) \S                                            # not a measured error
    | Error\ (?:while\ |when\ )?(?:executing|invoking|calling|running)\ (?:the\ )?(?:tool|function)\b  # LangGraph, MCP
    | An\ error\ occurred\ while\ (?:running|parsing|executing|calling|invoking|using|processing)\b    # OpenAI Agents
    | I\ encountered\ an\ error\ while\ trying\ to\ use\ the\ tool\b                # CrewAI
    | Encountered\ error:\ \S                                                       # LlamaIndex
    | Input\ validation\ error:\ \S                                                 # MCP
    | \d+\ validation\ errors?(?:\ for\ \w|:(?:\s|\Z))                              # Pydantic
    | Unknown\ tool\b
    | Tool\ {_TOOL}\ (?:not\ found|is\ not\ available|does\ not\ exist|(?:execution\ )?failed|timed\ out\ after)\b
    | Tool\ (?:execution\ )?(?:error|failed):\ \S
    | You\ tried\ to\ use\ the\ tool\ {_TOOL},\ but\ it\ doesn't\ exist\b           # CrewAI
    | [\w.-]+\ is\ not\ a\ valid\ tool,\ try\ one\ of\ \[                           # LangChain
    | (?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?::\ \S|\(.*\)\Z)              # a Python exception
    )""",
    re.VERBOSE | re.DOTALL,
)
_TRACEBACK = "Traceback (most recent call last):\n"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b")
"""How the last line of a traceback begins."""
_MARKS = ("error", "tool_error", "tool_use_error")
_ADVICE = re.compile(r"(?:Please fix your mistakes|[Ff]ix the errors? and try again)\.\s*\Z")
"""The last sentence of error texts of LangGraph and Pydantic AI."""
_DOUBTFUL = re.compile(
    r"\W*(?:an |the |internal |unexpected |fatal )*"
    r"(?:errors?|exception|traceback|fail(?:ed|ure)|fatal|invalid|unable to|could(?: not|n't)|can(?:not|'t)|"
    r"something went wrong|no such|permission denied|access denied|bad request)\b",
    re.IGNORECASE,
)
_ABOUT_AN_ERROR = re.compile(
    r"error(?:_type|_code)?|type|(?:status_?)?code|status|message|msg|details?|reason|hint|success|ok|is_?[eE]rror|"
    r"id|request_id|jsonrpc|tool|(?:tool_)?name|tool_call_id|traceback|stack|timestamp|retryable"
)


def failed(text: str) -> bool | None:
    """Return whether a tool failed, by the text of its result; None if that is uncertain."""
    if text.lstrip()[:1] in ("{", '"'):
        try:
            document = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            document = None
        if isinstance(document, dict):
            return _failed_object(document)
        if isinstance(document, str):
            text = document
    if _is_error(text.strip()):
        return True
    return None if _DOUBTFUL.match(text) else False


def _is_error(text: str) -> bool:
    """Whether a text is an error as a framework or Python writes it; takes time linear in its length."""
    if text.startswith(_TRACEBACK):
        _, newline, last = text.removeprefix(_TRACEBACK).rpartition("\n")
        if newline and _EXCEPTION.match(last):
            return True
    if any(text.startswith(f"<{mark}>") and text.endswith(f"</{mark}>") for mark in _MARKS):
        return True
    return bool(_FAILED.match(text) or _ADVICE.search(text[-100:]))


def _failed_object(document: dict[str, Any]) -> bool | None:
    """Return True for an object that reports an error and has no other content; None if that is uncertain."""
    if document.get("isError") is True or document.get("is_error") is True:
        return True
    error = document.get("error")
    wrong = error is True or (isinstance(error, str | dict) and bool(error)) or document.get("status") == "error"
    if wrong and not any(value for name, value in document.items() if not _ABOUT_AN_ERROR.fullmatch(name)):
        return True
    return None if wrong or document.get("success") is False or document.get("ok") is False else False


def ending(result: ToolResult | None, span: Span | None) -> Evidence | None:
    """Return whether a tool failed or succeeded, and why; None if it is not known."""
    error = span_error(span) if span is not None else None
    if error is not None:
        return SignalKind.TOOL_FAILED, f"its span ended with an error: {error}"
    if result is None:
        return (SignalKind.TOOL_SUCCEEDED, "its span ended without an error") if span is not None else None
    if result.error:
        return SignalKind.TOOL_FAILED, f"its result is marked as an error: {result.text}"
    match failed(result.text), span:
        case True, None:
            return SignalKind.TOOL_FAILED, f"its result is an error: {result.text}"
        case False, None:
            return SignalKind.TOOL_SUCCEEDED, "its result is not an error"
        case False | None, Span():
            return SignalKind.TOOL_SUCCEEDED, "its span ended without an error"
    return None
