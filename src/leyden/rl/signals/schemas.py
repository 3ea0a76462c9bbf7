"""Validates the arguments of a tool call against the tool's JSON schema, without fetching remote references.

Agents send any schema, and some take years to check: regular expressions, which Python cannot interrupt, or references
that repeat each other. So a pattern is not checked on a text that is too long for it, and a schema that is too large
or takes too many steps is not checked any further.
"""

import math
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # jsonschema has no types
from jsonschema.exceptions import best_match  # type: ignore[import-untyped]  # likewise
from jsonschema.validators import extend, validator_for  # type: ignore[import-untyped]  # likewise
from referencing import Registry

_canonical = msgspec.json.Encoder(order="deterministic").encode
_REPETITION, _REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")
_MAX_STEPS, _MAX_LENGTH = 1_000_000, 20
"""Steps of a pattern in a text; length of a text for a pattern that repeats a group, whose steps grow exponentially."""
_MAX_BYTES, _MAX_KEYWORDS = 1 << 16, 10_000
"""Size of a schema, and how many of its keywords are checked for one call."""
_NAME_LENGTH = 100
"""The length of a property's name for which its pattern must be cheap."""

_checked = threading.local()


def violation(arguments: Mapping[str, Any], schema: Any) -> str | None:
    """Return how arguments break a schema; None if they do not, or if the schema itself cannot be used."""
    if not isinstance(schema, dict):
        return None
    _checked.keywords = 0
    try:
        error = best_match(_validator(_canonical(schema)).iter_errors(dict(arguments)))
    except Exception:  # agents send any schema: invalid, recursive without end, or with remote references
        return None
    return f"{error.json_path}: {error.message}" if error is not None else None


def follows(arguments: str, schema: Any) -> bool:
    """Return whether the JSON text of a call's arguments is an object that follows a schema."""
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(decoded, dict) and violation(decoded, schema) is None


@lru_cache(maxsize=1024)
def _validator(schema: bytes) -> Any:
    decoded = msgspec.json.decode(schema)
    if len(schema) > _MAX_BYTES or b'"unevaluated' in schema:  # which follows references without checking keywords
        raise ValueError("the schema may take long to check")
    if schema.count(b'"$schema"') > ("$schema" in decoded):  # a part of another draft has a validator of its own
        raise ValueError("a part of the schema is of another draft")
    if any(_may_take_long(pattern, _NAME_LENGTH) for pattern in _name_patterns(decoded)):
        raise ValueError("the pattern of a property's name may take long")
    validator = validator_for(decoded, default=Draft202012Validator)
    validator.check_schema(decoded)
    checks = {**validator.VALIDATORS, "pattern": _check_pattern}
    bounded = extend(validator, {keyword: _bounded(check) for keyword, check in checks.items()})
    return bounded(decoded, registry=Registry())


def _bounded(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return the check of a keyword that raises when too many keywords were checked for one call."""

    def bounded(*arguments: Any) -> Any:
        _checked.keywords += 1
        if _checked.keywords > _MAX_KEYWORDS:
            raise ValueError("the schema takes long to check")
        return check(*arguments)

    return bounded


def _check_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    if isinstance(instance, str) and not _may_take_long(pattern, len(instance)):
        yield from Draft202012Validator.VALIDATORS["pattern"](validator, pattern, instance, schema)


def _may_take_long(pattern: str, length: int) -> bool:
    """Whether matching a text of this length may take many steps: a factor of the length for each repetition."""
    repetitions = len(_REPETITION.findall(pattern))
    repeats_group = _REPEATED_GROUP.search(pattern) is not None
    return (repeats_group and length > _MAX_LENGTH) or repetitions * math.log(length or 1) > math.log(_MAX_STEPS)


def _name_patterns(schema: Any) -> Iterator[str]:
    """Yield every pattern of property names in a schema."""
    if isinstance(schema, dict):
        names = schema.get("patternProperties")
        yield from names if isinstance(names, dict) else ()
        for part in schema.values():
            yield from _name_patterns(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _name_patterns(part)
