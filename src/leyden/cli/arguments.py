"""Parsers of single arguments. An invalid argument raises an error that says what to write."""

import argparse
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from leyden.config.schema import STORE_VARIABLE, UPSTREAM_KEY_VARIABLE
from leyden.records import ID_CHARACTERS, ID_PATTERN, ID_RULE, Id
from leyden.urls import has_password, without_userinfo


def integer(least: int, most: int) -> Callable[[str], int]:
    """Return a parser of integers within a range."""

    def read(text: str) -> int:
        with suppress(ValueError):
            if least <= int(text) <= most:
                return int(text)
        raise argparse.ArgumentTypeError(f"write a whole number from {least} to {most}, not {text!r}")

    return read


def default_home() -> Path:
    """Return the folder of all runs if `--home` is not given."""
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


def add_store(command: argparse.ArgumentParser, about: str) -> None:
    """Add the argument that names a database."""
    command.add_argument(
        "--store", metavar="URL", type=_store, default=os.environ.get(STORE_VARIABLE) or None, help=about
    )


def _store(text: str) -> str:
    """Parse the path or URL of a database. Other users of a machine can read command lines."""
    if text != os.environ.get(STORE_VARIABLE) and "://" in text and has_password(text):
        raise argparse.ArgumentTypeError(
            "other users can read a password on a command line: put it into PGPASSWORD or ~/.pgpass, or the whole URL "
            f"into {STORE_VARIABLE}"
        )
    return text


def url(text: str) -> str:
    """Parse the URL of a server."""
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise argparse.ArgumentTypeError(
            f"{without_userinfo(text)} was written with a user or a password, which others can read: leave them out "
            f"(the key of an upstream goes into {UPSTREAM_KEY_VARIABLE})"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not the URL of a server: write http://host:port")
    return text.rstrip("/")
