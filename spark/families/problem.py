"""A problem: what is asked, what is right, and which of the four kinds of use it may be put to.

`split_of` alone decides whether spark's teachers may show a problem: by a hash of its key, so that what reinforcement
learning trains on and what measures it were never taught, in whatever order they are generated.
"""

import hashlib
from collections.abc import Callable
from random import Random
from typing import Any, Literal, NamedTuple

Split = Literal["teach", "train", "held_out", "unseen"]
"""Shown by the teachers; free for RL; of RL's distribution but in no RL task; of phrasings and numbers RL never has."""
Message = dict[str, Any]
Tool = Callable[[str], str]
"""The one argument of a call to the text that comes back; a mistake comes back as `Error: ...`."""
HELD = {"teach": "teach", "train": "train", "held_out": "held_out", "unseen": "held_out"}


class Problem(NamedTuple):
    """One question. `facts` is what its tool and its teacher know, in plain JSON."""

    key: str
    """What makes it this problem: names that only decorate it are left out."""
    question: str
    answer: str | int
    facts: dict[str, Any]


def split_of(key: str) -> str:
    """Where a problem belongs: 70 % teach, 20 % train, 10 % held_out."""
    share = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") / 2**32
    return "teach" if share < 0.7 else "train" if share < 0.9 else "held_out"


def problem_of_split(generate: Callable[[Random, Split], Problem], rng: Random, split: Split) -> Problem:
    """Return a problem of a split: generates problems until the hash of one's key allows it."""
    while True:
        problem = generate(rng, split)
        if split_of(problem.key) == HELD[split]:
            return problem


def chance(rng: Random, probability: float) -> bool:
    """Whether something happens this time."""
    return rng.random() < probability


def weighted(rng: Random, weights: dict[str, float]) -> str:
    """One of the keys, as often as its weight says."""
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


def misread(rng: Random, value: str) -> str:
    """A number as somebody reads it who does not look closely: another digit, one too few, one twice."""
    places = [place for place, char in enumerate(value) if char.isdigit()]
    if not places:
        return value
    place = rng.choice(places)
    kind = rng.random()
    if kind < 0.2 and len(places) > 1:
        return value[:place] + value[place + 1 :]
    if kind < 0.35:
        return value[:place] + value[place] + value[place:]
    digit = rng.choice([char for char in "0123456789" if char != value[place] and (place or char != "0")])
    return value[:place] + digit + value[place + 1 :]
