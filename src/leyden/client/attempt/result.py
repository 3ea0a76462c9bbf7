"""Reads what an agent returns: a result, a reward, or both. Only this module decides what counts as the reward."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import msgspec
from msgspec import Struct

from leyden.records import GivenReward, Name

MAX_RESULT_BYTES = 1 << 20
"""Size limit of a result as JSON. Of a larger one the beginning is recorded, and no reward function is given it."""
MAX_ANSWER_BYTES = 4 * MAX_RESULT_BYTES
"""Size limit of what a command prints or an endpoint answers as its result. A larger one is not read."""


class Result(Struct, frozen=True):
    """Returned by an agent that gives both its result and the final reward of the attempt."""

    value: Any = None
    reward: Any = None


class TwoRewards(Exception):
    """The agent returned a reward although the run has a reward function."""

    def __init__(self) -> None:
        super().__init__(
            "the agent returned a reward, but the run has a reward function: "
            "return only the result, or remove `reward` from the configuration"
        )


class NotAReward(Exception):
    """The reward is neither a finite number nor several by name."""


def split_returned(value: Any, has_reward_function: bool) -> tuple[Any, Any]:
    """Split a return value into the result and the reward, which is not validated; with a function there is none."""
    if isinstance(value, Result):
        if has_reward_function and value.reward is not None:
            raise TwoRewards
        return value.value, value.reward
    if not has_reward_function and isinstance(value, Real):
        return value, value
    return value, None


def parse_reward(value: Any, giver: str) -> float:
    """Convert a reward to a finite float: a Python or numpy number, or a tensor of one element. True is 1."""
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise NotAReward(f"{giver} gave {_safe_repr(value)} as reward: return a number")
    try:
        number = float(value)
    except Exception as error:
        raise NotAReward(f"{giver} gave {_safe_repr(value)} as reward: {error}") from error
    if not math.isfinite(number) or abs(number) > 1e30:
        raise NotAReward(f"{giver} gave {number} as reward: return a finite number")
    return number


def parse_final_reward(value: Any, giver: str) -> GivenReward:
    """Convert the final reward of an attempt: a number, or numbers by the names of its parts."""
    if not isinstance(value, Mapping):
        return parse_reward(value, giver)
    if not value:
        raise NotAReward(f"{giver} gave no part of a reward: return a number, or numbers by name")
    try:
        names = msgspec.convert(list(value), list[Name])
    except msgspec.ValidationError as error:
        raise NotAReward(f"{giver} gave parts of a reward with the names {_safe_repr(list(value))}: {error}") from error
    return {name: parse_reward(value[name], f"{giver}, for part {name!r},") for name in names}


def to_json(value: Any) -> bytes:
    """Encode any value as JSON. Values that cannot be encoded are replaced by their `repr`."""
    try:
        text = msgspec.json.encode(value, enc_hook=_encode_other)
    except Exception:  # cyclic values, invalid text, non-string keys: the attempt must end normally
        text = msgspec.json.encode(_safe_repr(value, MAX_RESULT_BYTES))
    return text


def cut_result(text: bytes) -> bytes:
    """Return a result as it is recorded: one that is too large as its beginning, with a note."""
    if len(text) <= MAX_RESULT_BYTES:
        return text
    beginning = text[: MAX_RESULT_BYTES // 2].decode(errors="ignore")
    return msgspec.json.encode(f"{beginning}... (cut: the result has {len(text)} bytes)")


def describe_too_large(size: int, limit: int) -> str:
    """Return the message of an attempt whose result is too large."""
    return f"the result is too large: {size:,} bytes as JSON, and {limit:,} are the most: return less, or name a file"


def _encode_other(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic
    if callable(dump):
        return dump(mode="json")
    scalar = getattr(value, "item", None)  # numpy numbers and tensors of one element
    if callable(scalar) and getattr(value, "size", None) == 1:
        return scalar()
    return _safe_repr(value, MAX_RESULT_BYTES)


def _safe_repr(value: Any, length: int = 200) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<a {type(value).__name__} whose repr fails: {type(error).__name__}>"
    return text.encode(errors="backslashreplace").decode()[:length]
