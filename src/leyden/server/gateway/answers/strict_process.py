"""Checks arguments of tool calls against schemas: `python -m leyden.server.gateway.answers.strict_process SOCKET`.

A request is a list of pairs of arguments and schema, in JSON, and the answer a list of results.
"""

import sys
from typing import Any

import msgspec

from leyden.process.answering import answer_requests

_CHECK_S = 1.0
"""CPU time for the schemas of one answer."""


def main(fd: int) -> None:
    """Check calls until the socket closes."""
    from leyden.rl.signals.schemas import CheckTime, check_text  # it takes time to import, which others need more

    decode = msgspec.json.Decoder(list[tuple[str, Any]]).decode

    def answer(body: bytes) -> bytes:
        allowed = CheckTime(_CHECK_S)
        return msgspec.json.encode([check_text(text, schema, allowed).result for text, schema in decode(body)])

    answer_requests(fd, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
