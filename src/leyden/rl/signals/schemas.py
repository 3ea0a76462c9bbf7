"""Whether the arguments of a tool call keep to the tool's JSON schema. Nothing is ever fetched for it."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import best_match  # type: ignore[import-untyped]
from jsonschema.validators import validator_for  # type: ignore[import-untyped]
from referencing import Registry

_canonical = msgspec.json.Encoder(order="deterministic").encode


def broken(arguments: Mapping[str, Any], schema: Any) -> str | None:
    """How arguments break a schema; None where they do not, or where the schema itself is of no use."""
    if not isinstance(schema, dict):
        return None
    try:
        error = best_match(_validator(_canonical(schema)).iter_errors(dict(arguments)))
    except Exception:  # a schema is whatever an agent sends: not sound, without an end, or somewhere else
        return None
    return f"{error.json_path}: {error.message}" if error is not None else None


@lru_cache(maxsize=1024)
def _validator(schema: bytes) -> Any:
    read = msgspec.json.decode(schema)
    kind = validator_for(read, default=Draft202012Validator)
    kind.check_schema(read)
    return kind(read, registry=Registry())
