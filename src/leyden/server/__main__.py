"""A server as a process: `python -m leyden.server OPTIONS SOCKET`. The engine is at the other end of the socket.

It prints where it listens, in JSON. SIGTERM has it finish what it accepted; when the socket closes it ends at once:
what it acknowledged is kept, and all else failed with the engine.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys

import msgspec
import uvloop
from msgspec.structs import replace

from leyden.config.schema import UPSTREAM_KEY_VARIABLE
from leyden.engine.distant import DistantEngine
from leyden.server.gateway.admission import Admission
from leyden.server.gateway.chatml import renderer_for
from leyden.server.gateway.policy import Policy
from leyden.server.gateway.tokenizer import Tokenizer
from leyden.server.options import Beside, Unservable
from leyden.server.serve import serving

_GONE = "the process that ran it is gone"


def main() -> int:
    """Serve until a signal, or the other end, says to stop."""
    parser = argparse.ArgumentParser(prog="python -m leyden.server", description=__doc__)
    parser.add_argument("options", help="in JSON")
    parser.add_argument("socket", type=int, help="the descriptor of a stream to an engine")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.set_inheritable(arguments.socket, False)
    try:
        uvloop.run(_serve(Beside.from_json(arguments.options), socket.socket(fileno=arguments.socket)))
    except Unservable as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


async def _serve(options: Beside, stream: socket.socket) -> None:
    engine = DistantEngine(*await asyncio.open_connection(sock=stream), options.context, options.vocabulary)
    tokenizer = Tokenizer.load(options.model, options.name)
    admission = Admission(at_once=options.at_once)
    policy = Policy(options.policy, engine, renderer_for(tokenizer), tokenizer, admission)
    serve = replace(options.serve, upstream_key=os.environ.get(UPSTREAM_KEY_VARIABLE))  # for arguments can be seen
    async with serving(serve, policy) as server:
        if options.release:
            await server.service.store.release(_GONE)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
        sys.stdout.write(msgspec.json.encode(server.running).decode() + "\n")
        sys.stdout.flush()
        await asyncio.wait({server.stopped, engine.ended}, return_when=asyncio.FIRST_COMPLETED)
        if engine.ended.done():
            os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
