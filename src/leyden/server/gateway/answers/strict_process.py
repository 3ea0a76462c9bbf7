"""Checks arguments of tool calls against schemas, in a process of its own.

It reads lines of JSON, each a list of pairs of arguments and schema, and answers each with a line of results. It ends
when standard input closes. Other processes come first when the machine is busy.
"""

import os
import sys
from typing import Any

import msgspec

_CHECK_S = 1.0
"""CPU time for the schemas of one answer."""


def main() -> None:
    """Answer until standard input closes."""
    os.nice(10)
    from leyden.rl.signals.schemas import CheckTime, check_text  # it takes time to import, which others need more

    decode = msgspec.json.Decoder(list[tuple[str, Any]]).decode
    for line in sys.stdin.buffer:
        allowed = CheckTime(_CHECK_S)
        results = [check_text(arguments, schema, allowed).result for arguments, schema in decode(line)]
        sys.stdout.buffer.write(msgspec.json.encode(results) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
