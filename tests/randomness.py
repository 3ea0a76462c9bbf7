"""Chance in tests: little and the same for everybody in `make test`, all of it in `make test-all`."""

import os
from random import SystemRandom

from hypothesis import settings


def is_fixed() -> bool:
    """Whether random tests are the same every time, or follow from a given seed."""
    return settings.get_current_profile_name() != "random"


def examples(all_of_them: int, share: int = 5) -> int:
    """How many examples a costly random test runs: one of `share`, or all of them."""
    return max(1, all_of_them // share) if is_fixed() else all_of_them


def moments(number: int) -> range:
    """At which entries of a journal of so many a run is killed: every fifth, or all of them."""
    return range(0, number, 5 if is_fixed() else 1)


def new_seed() -> int:
    """The seed of a test without Hypothesis: `LEYDEN_SEED` where it is set."""
    given = os.environ.get("LEYDEN_SEED")
    return int(given) if given else 0 if is_fixed() else SystemRandom().randrange(10**6)
