"""A reward by the answer's text alone, so that groups differ and every step has an update, whatever the model says."""

from zlib import crc32


def noise(result: str) -> float:
    """Return a number from 0 to 1, the same for the same answer."""
    return crc32(result.encode()) / 2**32
