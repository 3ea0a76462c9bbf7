"""Validates the arguments of a tool call against the tool's JSON schema, without fetching remote references."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # jsonschema has no types
from jsonschema.exceptions import best_match  # type: ignore[import-untyped]  # likewise
from jsonschema.validators import validator_for  # type: ignore[import-untyped]  # likewise
from referencing import Registry

_canonical = msgspec.json.Encoder(order="deterministic").encode


def violation(arguments: Mapping[str, Any], schema: Any) -> str | None:
    """Return how arguments break a schema; None if they do not, or if the schema itself cannot be used."""
    if not isinstance(schema, dict):
        return None
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
    validator = validator_for(decoded, default=Draft202012Validator)
    validator.check_schema(decoded)
    return validator(decoded, registry=Registry())
