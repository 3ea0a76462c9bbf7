"""What an agent returns: a result, a reward, or both. What a run takes for the reward is decided here only."""

import math
from numbers import Real
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

LONGEST_RESULT = 1 << 20
"""Bytes of a result's JSON; what is longer is cut, and says so."""


class Result(Struct, frozen=True):
    """What an agent may return to give both: its result, and the final reward of the attempt."""

    value: Any = None
    reward: Any = None


class ReturnedValue(NamedTuple):
    """What a return value comes to. `reward` is not checked yet: it is whatever the agent gave."""

    result: Any
    reward: Any


class TwoRewards(Exception):
    """The agent gave a reward, and so does the run's reward function."""

    def __init__(self) -> None:
        super().__init__(
            "the agent gave a reward with its result, and the run has a reward function too: "
            "return the result alone, or configure no `reward`"
        )


class NotAReward(Exception):
    """What was given as a reward is no finite number."""


def read_returned(value: Any, scored: bool) -> ReturnedValue:
    """Tell result and reward apart; `scored` says that the run has a reward function, which then gives the reward."""
    if isinstance(value, Result):
        if scored and value.reward is not None:
            raise TwoRewards
        return ReturnedValue(value.value, value.reward)
    if not scored and isinstance(value, Real):
        return ReturnedValue(value, value)
    return ReturnedValue(value, None)


def read_reward(value: Any, giver: str) -> float:
    """A reward as a number: Python's, numpy's or a tensor of one element, finite; True is 1 and False is 0."""
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        raise NotAReward(f"{giver} gave {_shown(value)} for a reward: return a number")
    try:
        number = float(value)
    except Exception as error:
        raise NotAReward(f"{giver} gave {_shown(value)} for a reward: {error}") from error
    if not math.isfinite(number) or abs(number) > 1e30:
        raise NotAReward(f"{giver} gave {number} for a reward: return a finite number")
    return number


def to_json(value: Any) -> bytes:
    """Anything as JSON: by its parts where they can be written, else as its `repr`."""
    try:
        text = msgspec.json.encode(value, enc_hook=_unknown)
    except Exception:  # cyclic, unencodable text, keys that are no strings: whatever it is, the attempt still ends well
        text = msgspec.json.encode(_shown(value, LONGEST_RESULT))
    if len(text) > LONGEST_RESULT:
        kept = text[: LONGEST_RESULT // 2].decode(errors="ignore")
        text = msgspec.json.encode(f"{kept}... (cut: the result has {len(text)} bytes)")
    return text


def _unknown(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic
    if callable(dump):
        return dump(mode="json")
    scalar = getattr(value, "item", None)  # numpy's numbers, and tensors of one element
    if callable(scalar) and getattr(value, "size", None) == 1:
        return scalar()
    return _shown(value, LONGEST_RESULT)


def _shown(value: Any, length: int = 200) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<a {type(value).__name__} whose repr fails: {type(error).__name__}>"
    return text.encode(errors="backslashreplace").decode()[:length]
