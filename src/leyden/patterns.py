"""Matches regular expressions against the texts of agents in time linear in the text, without backtracking.

The syntax is that of JSON schemas (ECMA 262) without look-around and back-references, which need backtracking. The time
of a match is at most the length of the text times the size of the compiled expression, and that product is bounded, so
a match takes milliseconds at most if an agent wrote the expression.
"""

import re
from collections.abc import Callable
from functools import lru_cache

_MAX_TEXT = 1 << 16
"""The most characters of a text that an expression is searched in."""
_MAX_PATTERN = 500
"""The most characters of an expression: compiling takes long if each stands for much of Unicode."""
_MAX_STEPS, _MAX_SIZE = 1 << 28, 1 << 20
"""Bytes of an agent's compiled expression times characters of the text, and the most bytes of one."""
_RULE_SIZE = 1 << 16
"""The most bytes of a compiled rule, which its owner has no reason to make slow."""


class PatternError(ValueError):
    """An expression cannot be matched in linear time, or not in a text of this length."""


def contains(pattern: str, text: str) -> bool:
    """Return whether an agent's expression matches somewhere in a text; raise `PatternError` if that is unknown."""
    if len(text) > _MAX_TEXT:
        raise PatternError(f"the text has {len(text)} characters, and expressions are searched in {_MAX_TEXT} at most")
    # A power of two, so that few sizes are compiled.
    size = min(_MAX_SIZE, _MAX_STEPS >> max(0, len(text) - 1).bit_length())
    return _compiled(pattern, size)(text)


def applies(rule: str, text: str) -> bool:
    """Return whether a rule of a run's owner matches somewhere in the beginning of a text; raises as `check_rule`."""
    return _compiled(rule, _RULE_SIZE)(text[:_MAX_TEXT])


def check_rule(rule: str) -> None:
    """Raise `PatternError` if a rule cannot be applied to texts."""
    _compiled(rule, _RULE_SIZE)


@lru_cache(maxsize=1024)
def _compiled(pattern: str, size: int) -> Callable[[str], bool]:
    from jsonschema_rs import RegexOptions, ValidationError, validator_for  # slow to import, and few processes need it

    if len(pattern) > _MAX_PATTERN:
        raise PatternError(f"it has {len(pattern)} characters, and may have {_MAX_PATTERN}")
    try:
        options = RegexOptions(size_limit=size, dfa_size_limit=_MAX_SIZE)
        return validator_for({"pattern": pattern}, pattern_options=options).is_valid
    except ValidationError as error:
        raise PatternError(_reason(pattern)) from error


def _reason(pattern: str) -> str:
    """Return why an expression cannot be compiled, for whoever wrote it."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"it is not a regular expression: {error}"
    return (
        "write it in the syntax of ECMA 262, without look-around, back-references and large numbers of repetitions, "
        "which take long to match"
    )
