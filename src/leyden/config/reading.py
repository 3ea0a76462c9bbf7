"""Reads a configuration into a `Config`; a `ConfigError` is one line that names what to change and where."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import msgspec
import tomli_w
from msgspec import Struct
from msgspec.structs import fields

from leyden.config.explaining import dotted, explain
from leyden.config.policies import policy_configs
from leyden.config.schema import Config

Document = dict[str, Any]

_TWICE = re.compile(r"Cannot declare \((.*)\) twice")
_QUOTED = re.compile(r"'([^']*)'")


class ConfigError(Exception):
    """A configuration that cannot be run; the message is one line."""


def near_file(path: Path, pattern: str = "*") -> str:
    """Return a question that names the file beside a missing one whose name is most like it; "" if none is."""
    beside = [] if path.exists() else sorted(path.parent.glob(pattern))
    names = [one.name for one in beside]
    near = [one.name for one in beside if one.stem == path.name] or difflib.get_close_matches(path.name, names, 1)
    return f" (did you mean {near[0]}?)" if near else ""


def read_file(path: Path, settings: Sequence[str] = ()) -> Document:
    """Read a TOML file, with settings on top. `run` defaults to the file's name, `base` to its folder."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}{near_file(path, '*.toml')}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: save it in that encoding") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        if path.suffix == ".py":
            hint = f'write a file such as mine.toml, with agent = "{path.name}:FUNCTION", and name that'
            raise ConfigError(f"{path} is Python and no configuration: {hint}") from error
        hint = ": text stands in quotes" if "Invalid value" in str(error) else ""
        message = _TWICE.sub(lambda found: f"[{'.'.join(re.findall(_QUOTED, found[1]))}] is there twice", str(error))
        raise ConfigError(f"{path}: {message}{hint}") from error
    whole = {"run": path.stem, "agent": "", "tasks": "", **document}
    try:
        read_config(whole)
    except ConfigError as error:  # raised again with the line
        key = re.match(r"`([^`]+)`", str(error))
        line = _line_of(text, key[1]) if key else None
        if not settings or not _is_right(whole, settings):
            raise ConfigError(f"{path}{f':{line}' if line else ''}: {error}") from error
    base = path.absolute().parent
    if isinstance(document.get("home"), str) and "base" not in document:
        document["home"] = str(base / document["home"])
    return override({"run": path.stem, "base": str(base), **document}, settings)


def _is_right(document: Document, settings: Sequence[str]) -> bool:
    """Whether a document is a configuration with these settings on top of it."""
    try:
        read_config(override(document, settings))
    except ConfigError:
        return False
    return True


def override(document: Document, settings: Iterable[str]) -> Document:
    """Put `key=value` settings on top of a document; a key may be dotted, a value is TOML or else a string."""
    document = dict(document)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{setting!r} sets nothing: write key=value, as in training.steps=20")
        if not all(key.strip().split(".")):
            raise ConfigError(f"`{key.strip()}` is no key: write names with one dot between them, as in training.steps")
        _put(document, key.strip(), _value(key.strip(), value.strip()))
    return document


def read_config(document: Mapping[str, Any]) -> Config:
    """Convert a document into a configuration."""
    try:
        config = msgspec.convert(_inherited(_spelled_out(document)), Config, str_keys=True)
        policy_configs(config)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), document)) from error
    except ValueError as error:  # what a policy has of its own does not go with the rest
        raise ConfigError(str(error)) from error
    return config


def to_toml(config: Config) -> str:
    """Write a configuration as TOML, with every default."""
    return document_to_toml(msgspec.to_builtins(config, str_keys=True))


def document_to_toml(document: Mapping[str, Any]) -> str:
    """Write a document as TOML. Keys that are None are left out: TOML has no null, and a missing key means the same."""
    return tomli_w.dumps(_without_none(document))


def flattened(document: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the values of a document by the whole names of their keys, as in `training.steps`."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        key = dotted(section, name)
        found |= flattened(value, key) if isinstance(value, Mapping) else {key: value}
    return found


def _put(document: Document, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        inner = document.get(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"`{section}` is not a section: `{key}` cannot be set")
        document[section] = dict(inner)
        document = document[section]
    document[name] = value


def _value(key: str, text: str) -> Any:
    """Read a value as TOML, or as the text itself if it is none or if the key holds text, such as `run=2024`."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if not isinstance(value, str) and key in _TEXT_KEYS else value


_TEXT_KEYS = ("run", "agent", "tasks", "reward", "model", "policy", "base", "home")


def _spelled_out(document: Mapping[str, Any], section: type[Struct] = Config) -> Document:
    """Return the document with short forms written out: a single text for a list, true or false for a section."""
    found = dict(document)
    for entry in fields(section):
        value = found.get(entry.name)
        kinds = (entry.type, *get_args(entry.type))
        if isinstance(value, str) and get_origin(entry.type) is tuple and Ellipsis in kinds:
            found[entry.name] = [value]
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Struct)), None)
        if inner is None:
            continue
        if isinstance(value, bool) and bool not in kinds and NoneType in kinds:
            found[entry.name] = {} if value else None
        elif isinstance(value, Mapping):
            if get_origin(entry.type) is dict:
                found[entry.name] = {
                    name: _spelled_out(one, inner) if isinstance(one, Mapping) else one for name, one in value.items()
                }
            else:
                found[entry.name] = _spelled_out(value, inner)
    return found


def _inherited(document: Document) -> Document:
    """Return the document with all keys of `algorithm` in the policies that have some of their own."""
    common, policies = document.get("algorithm"), document.get("policies")
    if not isinstance(common, Mapping) or not isinstance(policies, Mapping):
        return document
    found = {
        name: {**policy, "algorithm": {**common, **policy["algorithm"]}}
        if isinstance(policy, Mapping) and isinstance(policy.get("algorithm"), Mapping)
        else policy
        for name, policy in policies.items()
    }
    return {**document, "policies": found}


def _line_of(text: str, key: str) -> int | None:
    """Find the line of a dotted key in a TOML text; None if it is not found."""
    inside, sought = "", re.escape(key).replace("NAME", r"[\w-]+")
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            inside = header[1].strip()
            if re.fullmatch(sought, inside):
                return number
        elif (assigned := re.match(r"\s*([\w.-]+)\s*=", line)) and re.fullmatch(sought, dotted(inside, assigned[1])):
            return number
    return None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return value
