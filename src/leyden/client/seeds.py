"""Random numbers and the order of sets that are the same in every attempt of a task, so that it can be replayed."""

import random
import sys
from hashlib import blake2b
from typing import Any

import msgspec

HASH_SEED = {"PYTHONHASHSEED": "0"}
"""The environment of a process whose hashes of texts are those of every other."""


def seed_of(task: Any) -> int:
    """Return the seed of a task."""
    return int.from_bytes(blake2b(msgspec.json.encode(task), digest_size=4).digest())


def seed_generators(seed: int) -> None:
    """Seed the generator of `random`, and that of numpy if it is imported."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
