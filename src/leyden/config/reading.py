"""From what a user wrote to a `Config`, or to one line that names what to change and where."""

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import msgspec
import tomli_w

from leyden.config.schema import Config

Document = dict[str, Any]

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]+)`(?: - at `\$\.?(?P<at>[^`]*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<at>[^`]*)`)?")


class ConfigError(Exception):
    """A configuration that cannot be run, in one line."""


def read_file(path: Path) -> Document:
    """What a TOML file says. Its name is the run's where it gives none, and its folder is where its files are."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        read_config({"run": path.stem, "agent": "", "tasks": "", **document})
    except ConfigError as error:  # said once more with the line
        key = re.match(r"`([^`]+)`", str(error))
        line = _line_of(text, key[1]) if key else None
        raise ConfigError(f"{path}{f':{line}' if line else ''}: {error}") from error
    return {"run": path.stem, "base": str(path.absolute().parent), **document}


def override(document: Document, settings: Iterable[str]) -> Document:
    """A document with `key=value` settings on top; a key may be dotted, and a value is TOML or else a text."""
    document = dict(document)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{setting!r} sets nothing: write key=value, as in training.steps=20")
        _put(document, key.strip(), _value(value.strip()))
    return document


def read_config(document: Mapping[str, Any]) -> Config:
    """The configuration that a document describes."""
    try:
        return msgspec.convert(dict(document), Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error)).replace("[...]", ".NAME")) from error


def written(config: Config) -> str:
    """A configuration as TOML, with every default written out."""
    return tomli_w.dumps(_without_nothing(msgspec.to_builtins(config)))


def _put(document: Document, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        inner = document.get(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"`{section}` is not a section: `{key}` cannot be set")
        document[section] = dict(inner)
        document = document[section]
    document[name] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(message: str) -> str:
    if unknown := _UNKNOWN.fullmatch(message):
        section, name = unknown["at"] or "", unknown["name"]
        known = _keys(section)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean `{_join(section, near[0])}`?" if near else f"the keys there are {', '.join(known)}"
        return f"`{_join(section, name)}` is no key: {hint}"
    if missing := _MISSING.match(message):
        return f"`{missing['name']}` is missing: set it"
    wrong = _WRONG.fullmatch(message)
    assert wrong is not None
    what = wrong["what"][:1].lower() + wrong["what"][1:]
    return f"`{wrong['at']}`: {what}" if wrong["at"] else what


def _keys(section: str) -> list[str]:
    inner: Any = Config
    for name in filter(None, section.replace("[...]", "").split(".")):  # which stands for what the user names
        kind = next(entry.type for entry in msgspec.structs.fields(inner) if entry.name == name)
        inner = next((one for one in reversed(get_args(kind)) if one is not NoneType), kind)
    return [entry.name for entry in msgspec.structs.fields(inner)]


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _line_of(text: str, key: str) -> int | None:
    """Where a dotted key stands in a TOML text, as far as lines tell."""
    inside, sought = "", re.escape(key).replace("NAME", r"[\w-]+")
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            inside = header[1].strip()
        elif (assigned := re.match(r"\s*([\w.-]+)\s*=", line)) and re.fullmatch(sought, _join(inside, assigned[1])):
            return number
    return None


def _without_nothing(value: Any) -> Any:
    """TOML has no null: what is None is not written, and means the same."""
    if isinstance(value, dict):
        return {key: _without_nothing(inner) for key, inner in value.items() if inner is not None}
    return value
