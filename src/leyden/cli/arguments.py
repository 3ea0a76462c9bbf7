"""Parsers of single arguments. An invalid argument raises an error that says what to write."""

import argparse
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from leyden.records import ID_CHARACTERS, ID_PATTERN, ID_RULE, Id


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of integers within a range."""

    def read(text: str) -> int:
        with suppress(ValueError):
            if least <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"write a whole number from {least} to {most}, not {text!r}")

    return read


def default_home() -> Path:
    """Return the folder of all runs where `--home` is not given."""
    return Path(os.environ.get("LEYDEN_HOME", "runs"))


def identifier(text: str) -> str:
    """Parse an id."""
    try:
        return msgspec.convert(text, Id)
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an id: write {ID_RULE}") from error


def run_name(text: str) -> str:
    """Parse the name of a run: an id, or a longer one that was made from the name of a folder."""
    if not re.match(ID_PATTERN, text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a run: write {ID_CHARACTERS}")
    return text


def url(text: str) -> str:
    """Parse the URL of a server."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not the URL of a server: write http://host:port")
    return text.rstrip("/")
