"""Prints results as a person reads them."""

from msgspec import Struct
from msgspec.structs import asdict


class Readable(Struct, frozen=True):
    """Prints a record with a line for each field that says something."""

    def __str__(self) -> str:
        lines = {name.replace("_", " "): _readable(value) for name, value in asdict(self).items()}
        width = max(map(len, lines))
        return "\n".join(f"{name:{width}}  {text}" for name, text in lines.items() if text)


def _readable(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_readable(one)}" for name, one in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(_readable, value))
    return "" if value is None else str(value)
