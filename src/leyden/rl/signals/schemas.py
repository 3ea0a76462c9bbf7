"""Validates the arguments of a tool call against the tool's JSON schema, without fetching remote references.

Agents send any schema, and some take years to check: expressions that backtrack, or references that repeat each other.
So patterns are matched in linear time (`leyden.patterns`), and a schema that is too large or takes too long is not
checked any further. What was not checked is unknown, and never an error of the model.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from jsonschema import (  # type: ignore[import-untyped]  # jsonschema has no types
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    ValidationError,
)
from jsonschema.exceptions import best_match  # type: ignore[import-untyped]  # likewise
from jsonschema.validators import extend, validator_for  # type: ignore[import-untyped]  # likewise
from msgspec import Struct
from referencing import Registry

from leyden.patterns import PatternError, contains

_canonical = msgspec.json.Encoder(order="deterministic").encode
_MAX_BYTES, _MAX_ARGUMENTS = 1 << 16, 1 << 17
"""Bytes of a schema, and of arguments."""
_MAX_KEYWORDS, _MAX_S = 10_000, 0.1
"""How many keywords are checked for one tool call, and how much CPU time that may take at most."""
_DRAFTS = (Draft4Validator, Draft6Validator, Draft7Validator, Draft201909Validator, Draft202012Validator)
_NEGATIONS = (b'"not"', b'"oneOf"', b'"if"', b'"maxContains"')
"""Keywords under which a part that is not checked, and so taken for valid, can make a whole invalid."""


class SchemaCheck(Struct, frozen=True):
    """What is known of arguments: how they break the schema, and what of the schema could not be checked."""

    error: str | None = None
    unchecked: str | None = None

    @property
    def result(self) -> str:
        """One word: `invalid`, `unchecked` if something is unknown and nothing wrong, else `valid`."""
        return "invalid" if self.error is not None else "unchecked" if self.unchecked is not None else "valid"


class _TooLong(Exception):
    """The schema takes too long to check."""


class CheckTime:
    """CPU time for the checks of several calls; what remains is not checked when it is used up."""

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds


class _Progress(threading.local):
    """The check that a thread is at."""

    keywords = 0
    ends_at = 0.0
    unchecked: str | None = None


_progress = _Progress()


def check(arguments: Mapping[str, Any], schema: Any, allowed: CheckTime) -> SchemaCheck:
    """Check arguments against a schema of an agent. A schema that is no object says nothing about them."""
    if not isinstance(schema, dict):
        return SchemaCheck()
    started = time.thread_time()
    _progress.keywords, _progress.ends_at, _progress.unchecked = 0, started + min(_MAX_S, allowed.left_s), None
    try:
        if len(_canonical(arguments)) > _MAX_ARGUMENTS:
            raise _TooLong(f"the arguments have more than {_MAX_ARGUMENTS} bytes")
        encoded = _canonical(schema)
        error = best_match(_validator(encoded).iter_errors(dict(arguments)))
    except Exception as failure:  # agents send any schema: invalid, recursive without end, or with remote references
        return SchemaCheck(unchecked=str(failure) or type(failure).__name__)
    finally:
        allowed.left_s -= time.thread_time() - started
    if error is None or (_progress.unchecked is not None and any(word in encoded for word in _NEGATIONS)):
        return SchemaCheck(unchecked=_progress.unchecked)
    return SchemaCheck(f"{error.json_path}: {error.message}", _progress.unchecked)


def check_text(arguments: str, schema: Any, allowed: CheckTime) -> SchemaCheck:
    """Check the JSON text of a call's arguments, which must be an object."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return SchemaCheck("the arguments are not JSON")
    if not isinstance(decoded, dict):
        return SchemaCheck("the arguments are not an object")
    return check(decoded, schema, allowed)


@lru_cache(maxsize=1024)
def _validator(schema: bytes) -> Any:
    from jsonschema_rs import meta  # slow to import, and few processes need it

    if len(schema) > _MAX_BYTES or b'"unevaluated' in schema:  # which follows references without checking keywords
        raise _TooLong("the schema may take long to check")
    decoded = msgspec.json.decode(schema)
    if schema.count(b'"$schema"') > ("$schema" in decoded):  # a part of another draft has a validator of its own
        raise ValueError("a part of the schema is of another draft")
    validator = validator_for(decoded, default=Draft202012Validator)
    if validator not in _DRAFTS:
        raise ValueError("it is of a draft that is not known")
    # `meta` would fetch a draft that it does not know.
    if not meta.is_valid({**decoded, "$schema": validator.META_SCHEMA["$schema"]}):
        raise ValueError("it is not a JSON schema")
    bounded = extend(validator, {name: _bounded(_LINEAR.get(name, of)) for name, of in validator.VALIDATORS.items()})
    return bounded(decoded, registry=Registry())


def _bounded(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return the check of a keyword that raises when the checks of one call take too long."""

    def bounded(*arguments: Any) -> Any:
        _progress.keywords += 1
        if _progress.keywords > _MAX_KEYWORDS or time.thread_time() > _progress.ends_at:
            raise _TooLong("the schema takes long to check")
        return check(*arguments)

    return bounded


def _matches(pattern: str, text: str) -> bool | None:
    """Return whether a pattern matches; None if that cannot be found out, which is noted."""
    if time.thread_time() > _progress.ends_at:
        raise _TooLong("the patterns of the schema take long to check")
    try:
        return contains(pattern, text)
    except PatternError as error:
        _progress.unchecked = f"the pattern {pattern[:100]!r}: {error}"
        return None


def _pattern(_: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, str) and _matches(pattern, instance) is False:
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for pattern, subschema in patterns.items():
        for name, value in instance.items():
            if _matches(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _additional_properties(validator: Any, allowed: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    more = [
        name
        for name in instance
        if name not in named and not any(_matches(pattern, name) in (True, None) for pattern in patterns)
    ]
    if isinstance(allowed, dict):
        for name in more:
            yield from validator.descend(instance[name], allowed, path=name)
    elif not allowed and more:
        yield ValidationError(f"additional properties are not allowed: {', '.join(map(repr, more))}")


def _unique_items(_: Any, unique: bool, instance: Any, schema: Any) -> Iterator[Any]:
    if unique and isinstance(instance, list) and len(set(map(_identity, instance))) < len(instance):
        yield ValidationError(f"{instance!r} has non-unique elements")


def _identity(value: Any) -> bytes:
    """Return a text that two values have in common if JSON schemas take them for equal, as 1 and 1.0."""
    return _canonical(_with_whole_numbers(value))


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_whole_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(_with_whole_numbers, value))
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


_LINEAR = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}
"""Keywords whose checks in `jsonschema` backtrack, or compare each item with each other."""
