"""Client and server meet over HTTP only, and no agent waits for torch."""

import subprocess
import sys

PROGRAM = """
import sys
import leyden.client.worker.__main__, leyden.client.worker.process
import leyden.client.runners.command_host, leyden.client.host.main
print(*sorted(m for m in sys.modules if m.partition(".")[0] in ("torch", "sqlalchemy") or "leyden.server" in m))
"""


def test_the_client_needs_neither_torch_nor_the_server() -> None:
    assert subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True).stdout == "\n"
