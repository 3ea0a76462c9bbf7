"""What a command prints where it is asked for JSON."""

import sys
from typing import Any

import msgspec


def print_json(value: Any) -> None:
    """Print a value as JSON for people, too."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode() + "\n")
