"""Google's form of JSON: names in two spellings, and schemas in the manner of OpenAPI."""

import re
from typing import Any

_USER_DATA = frozenset(
    {"args", "response", "parameters", "parameters_json_schema", "response_schema", "response_json_schema", "labels"}
)
"""Fields whose content is not Google's."""
_INTEGERS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
"""Google writes integers of 64 bits as text."""


def with_field_names(value: Any) -> Any:
    """Spell the names of all fields as `max_output_tokens`: Google's service reads them so and as `maxOutputTokens`.

    SDKs write integers as `5.0` too.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [with_field_names(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = ((re.sub(r"(?<=[a-z])[A-Z]", lambda found: f"_{found[0].lower()}", name), value[name]) for name in value)
    return {name: inner if name in _USER_DATA else with_field_names(inner) for name, inner in named}


def json_schema(schema: Any) -> Any:
    """Convert a schema of Google's to JSON Schema: types in lower case, `nullable` as a type."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for given, value in schema.items():
        match re.sub(r"_([a-z])", lambda found: found[1].upper(), given):
            case "propertyOrdering" | "nullable":
                pass
            case "type" if isinstance(value, str):
                made["type"] = value.lower()
            case "properties" if isinstance(value, dict):
                made["properties"] = {property: json_schema(inner) for property, inner in value.items()}
            case "anyOf" if isinstance(value, list):
                made["anyOf"] = [json_schema(option) for option in value]
            case "items" | "additionalProperties" as name:
                made[name] = json_schema(value)
            case name if name in _INTEGERS and isinstance(value, str) and value.isdecimal() and len(value) < 20:
                made[name] = int(value)
            case name:
                made[name] = value
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") is True else made
