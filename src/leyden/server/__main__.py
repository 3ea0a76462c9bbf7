"""Runs a server as a child process: `python -m leyden.server SOCKET`, with the engine at the other end of the socket.

It reads its options as a line of JSON from standard input and prints where it listens, also as JSON. When standard
input closes, it finishes accepted requests and ends. When the socket closes, it ends at once: acknowledged data is
durable, and everything else failed with the engine. It ignores signals, which its parent handles, except the one by
which the parent asks for its stack.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys

import msgspec
import uvloop
from msgspec.structs import replace

from leyden.config.schema import UPSTREAM_KEY_VARIABLE
from leyden.engine.remote import connected, describe_address
from leyden.rendering.factory import renderer_for
from leyden.rendering.tokenizer import Tokenizer, TokenizerError
from leyden.server.gateway.calls.scheduler import Scheduler
from leyden.server.gateway.served_model import ServedModel
from leyden.server.options import REFUSED, SHOW_STACK, STORE_LOST, ServeError, ServerProcessOptions
from leyden.server.serve import open_server
from leyden.store.errors import StoreError, StoreLost

_LOST_MESSAGE = "its worker or the server was started again"


def main(stream: int) -> int:
    """Serve until standard input or the engine closes; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(SHOW_STACK)
    announce = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output goes to the log
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.set_inheritable(stream, False)
    try:
        uvloop.run(_serve(ServerProcessOptions.from_json(sys.stdin.readline()), socket.socket(fileno=stream), announce))
    except StoreLost as error:
        sys.stderr.write(f"{error}\n")
        return STORE_LOST
    except (ServeError, StoreError, TokenizerError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    return 0


async def _serve(options: ServerProcessOptions, stream: socket.socket, announce: int) -> None:
    streams = await asyncio.open_connection(sock=stream)
    tokenizer = Tokenizer.load(options.model, options.name)
    scheduler = Scheduler(slots=options.engine.concurrency)
    async with connected(options.engine, *streams) as (engine, lost):
        model = ServedModel(
            options.policy, engine, renderer_for(tokenizer), tokenizer, scheduler, describe_address(options.engine)
        )
        if options.held:
            model.hold()
        serve = replace(options.serve, upstream_key=os.environ.get(UPSTREAM_KEY_VARIABLE))
        async with open_server(serve, [model], _LOST_MESSAGE if options.release else None, options.park) as server:
            with os.fdopen(announce, "wb") as output:
                output.write(msgspec.json.encode(server.running) + b"\n")
            input_closed = asyncio.create_task(_end_of_input())
            await asyncio.wait({input_closed, server.stopped, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                if (error := lost.exception()) is not None:
                    logging.error("the connection to the engine failed", exc_info=error)
                os._exit(1)


async def _end_of_input() -> None:
    """Wait until standard input closes."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
