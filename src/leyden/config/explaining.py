"""Explains in one line, which names what to write instead, why a configuration could not be read."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Struct
from msgspec.structs import fields

from leyden.config.schema import Config
from leyden.records import ID_PATTERN, ID_RULE

_SYNONYMS = {
    "lr": "learning_rate",
    "epoch": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "num_steps": "steps",
    "batch_size": "tasks_per_step",
    "n": "group_size",
    "num_generations": "group_size",
    "beta": "kl",
    "temp": "temperature",
    "max_new_tokens": "max_tokens",
    "max_grad_norm": "clip_norm",
    "r": "rank",
    "lora_rank": "rank",
    "name": "run",
    "dataset": "tasks",
}
"""Keys of other programs to ours, for the hint after a key that does not exist."""

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<at>[^`]*)`)?")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_WRONG = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<at>[^`]*)`)?")
_EXPECTED = re.compile(r"expected `([^`]+)`, got `\w+`")
_CHOICE = re.compile(r"invalid enum value (?P<got>.*)")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a section",
}
_TYPES = re.compile(r"`((?:\w+ \| )*\w+)`")


def explain(message: str, document: Mapping[str, Any]) -> str:
    """Explain an error of msgspec about a document. Names that the user gives are NAME."""
    return _explain(message, document).replace("[...]", ".NAME")


def dotted(section: str, name: str) -> str:
    """Return the whole name of a key."""
    return f"{section}.{name}" if section else name


def _explain(message: str, document: Mapping[str, Any]) -> str:
    if unknown := _UNKNOWN.fullmatch(message):
        section, name = unknown["at"] or "", unknown["name"]
        known = _keys(_annotation(section))
        near = " or ".join(f"`{key}`" for key in _near(name, section, known))
        hint = f"did you mean {near}?" if near else f"the keys there are {', '.join(known)}"
        return f"`{dotted(section, name)}` is no key: {hint}"
    if missing := _MISSING.match(message):
        return f"`{missing['name']}` is missing: set it"
    wrong = _WRONG.fullmatch(message)
    assert wrong is not None
    if wrong["at"] in ("held_out", "test"):
        return f"`{wrong['at']}`: expected a file of tasks, a whole number of tasks, or a fraction of them below 1"
    if repr(ID_PATTERN) in wrong["what"]:
        return f"`{wrong['at']}`: expected {ID_RULE}"
    what = wrong["what"][:1].lower() + wrong["what"][1:]
    if not wrong["at"]:
        return _in_words(what)
    if wrong["key"]:
        return f"`{wrong['at']}`: one of its keys: {_in_words(what)}"
    if choice := _CHOICE.fullmatch(what):
        return f"`{wrong['at']}`: expected {_choices(_annotation(wrong['at']))}, got {choice['got']}"
    expected = _EXPECTED.fullmatch(what)
    hint = _section_hint(wrong["at"], document) if expected and "object" in expected[1].split(" | ") else ""
    return f"`{wrong['at']}`: {_in_words(what)}{hint}"


def _near(name: str, section: str, known: list[str]) -> list[str]:
    """Return the keys that may be meant: of the same name or what it is called here, wherever they are, or alike."""
    wanted = (name, _SYNONYMS.get(name))
    everywhere = [*_all_keys(Config, "")]
    return (
        [dotted(section, key) for key in known if key in wanted]
        or [key for key in everywhere if key.rpartition(".")[2] in wanted]
        or [dotted(section, key) for key in difflib.get_close_matches(name, known, 1)]
        or [key for key in everywhere if key in difflib.get_close_matches(dotted(section, name), everywhere, 1, 0.8)]
        or [key for key in everywhere if difflib.get_close_matches(name, [key.rpartition(".")[2]], 1, 0.8)]
    )


def _all_keys(section: type[Struct], at: str) -> Iterator[str]:
    """Yield all keys but those below names that the user gives."""
    for entry in fields(section):
        yield dotted(at, entry.name)
        for kind in _kinds(entry.type):
            if _is_section(kind):
                yield from _all_keys(kind, dotted(at, entry.name))


def _section_hint(at: str, document: Mapping[str, Any]) -> str:
    """Return which keys a section has, and which of them takes the value that was given for the section."""
    annotation = _annotation(at)
    if known := _keys(annotation):
        value: Any = None if "[" in at else document
        for name in at.split(".") if value is not None else ():
            value = value[name]
        entries = (entry for kind in _kinds(annotation) if _is_section(kind) for entry in fields(kind))
        fitting = next((entry.name for entry in entries if _accepts(entry.type, value)), None)
        example = f", as in `{dotted(at, fitting)}={json.dumps(value)}`" if fitting else ""
        return f": its keys are {', '.join(known)}{example}"
    for names, values in (get_args(kind) for kind in _kinds(annotation) if get_origin(kind) is dict):
        if int not in _kinds(names):  # a schedule has steps
            return f": write `{at}.NAME{'.KEY' if _keys(values) else ''}=VALUE`"
    return ""


def _accepts(annotation: Any, value: Any) -> bool:
    """Whether a value is one that a key takes; of texts only those that are among its choices."""
    if isinstance(value, str) and not any(get_origin(kind) is Literal for kind in _kinds(annotation)):
        return False
    try:
        msgspec.convert(value, annotation)
    except msgspec.ValidationError:
        return False
    return value is not None


def _choices(annotation: Any) -> str:
    found = [str(one) for kind in _kinds(annotation) if get_origin(kind) is Literal for one in get_args(kind)]
    return f"{', '.join(found[:-1])} or {found[-1]}"


def _keys(annotation: Any) -> list[str]:
    """Return the keys of a section; none if it is no section, or one with names that the user gives."""
    return [entry.name for kind in _kinds(annotation) if _is_section(kind) for entry in fields(kind)]


def _annotation(at: str) -> Any:
    """Return the type of a key as the schema declares it."""
    found: Any = Config
    for name in re.findall(r"[^.\[\]]+|\[[^\]]*\]", at):
        if name[0] == "[":  # a name of the user, or an index
            values = [get_args(kind) for kind in _kinds(found) if get_origin(kind) in (dict, tuple)]
            found = values[0][1 if name == "[...]" else 0]
        else:
            (section,) = filter(_is_section, _kinds(found))
            found = next(entry.type for entry in fields(section) if entry.name == name)
    return found


def _kinds(annotation: Any) -> list[Any]:
    """Return the alternatives of a type, without None and without what restricts them."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for one in get_args(annotation) for kind in _kinds(one)]
    return [] if annotation is NoneType else [annotation]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _in_words(what: str) -> str:
    return _TYPES.sub(_name_types, what)


def _name_types(types: re.Match[str]) -> str:
    names = [name for name in types[1].split(" | ") if name != "null"]
    return " or ".join(_WORDS[name] for name in names) if names and all(map(_WORDS.get, names)) else types[0]
