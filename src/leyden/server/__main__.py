"""Runs a server as a child process: `python -m leyden.server SOCKET...`, with the engine of a policy at the other end
of each socket.

It reads its options as a line of JSON from standard input and prints where it listens, also as JSON. When standard
input closes, it finishes accepted requests and ends. When a socket closes, it ends at once: acknowledged data is
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
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
import uvloop
from msgspec.structs import replace

from leyden.config.schema import UPSTREAM_KEY_VARIABLE
from leyden.engine.remote import connected, describe_address
from leyden.rendering.factory import renderer_for
from leyden.rendering.tokenizer import Tokenizer, TokenizerError
from leyden.server.gateway.calls.scheduler import Scheduler
from leyden.server.gateway.served_model import ServedModel
from leyden.server.options import REFUSED, SHOW_STACK, STORE_LOST, ServedPolicy, ServeError, ServerProcessOptions
from leyden.server.serve import open_server
from leyden.store.errors import StoreError, StoreLost

_LOST_MESSAGE = "its worker or the server was started again"


def main(streams: Sequence[int]) -> int:
    """Serve until standard input or an engine closes; returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(SHOW_STACK)
    announce = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output goes to the log
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for stream in streams:
        os.set_inheritable(stream, False)
    try:
        sockets = [socket.socket(fileno=stream) for stream in streams]
        uvloop.run(_serve(ServerProcessOptions.from_json(sys.stdin.readline()), sockets, announce))
    except StoreLost as error:
        sys.stderr.write(f"{error}\n")
        return STORE_LOST
    except (ServeError, StoreError, TokenizerError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    return 0


async def _serve(options: ServerProcessOptions, sockets: Sequence[socket.socket], announce: int) -> None:
    async with AsyncExitStack() as opened:
        models, connections = [], set[asyncio.Task[None]]()
        for policy, stream in zip(options.policies, sockets, strict=True):
            model, lost = await _connect(policy, stream, opened)
            models.append(model)
            connections.add(lost)
        serve = replace(options.serve, upstream_key=os.environ.get(UPSTREAM_KEY_VARIABLE))
        async with open_server(serve, models, _LOST_MESSAGE if options.release else None, options.park) as server:
            with os.fdopen(announce, "wb") as output:
                output.write(msgspec.json.encode(server.running) + b"\n")
            input_closed = asyncio.create_task(_end_of_input())
            await asyncio.wait({input_closed, server.stopped, *connections}, return_when=asyncio.FIRST_COMPLETED)
            for lost in connections:
                if lost.done():
                    if (error := lost.exception()) is not None:
                        logging.error("the connection to the engine failed", exc_info=error)
                    os._exit(1)


async def _connect(
    policy: ServedPolicy, stream: socket.socket, opened: AsyncExitStack
) -> tuple[ServedModel, asyncio.Task[None]]:
    """Return the model of a policy, and a task that ends when the process that owns its engine is gone."""
    reader, writer = await asyncio.open_connection(sock=stream)
    tokenizer = Tokenizer.load(policy.model, policy.name)
    engine, lost = await opened.enter_async_context(connected(policy.engine, reader, writer))
    scheduler, location = Scheduler(slots=policy.engine.concurrency), describe_address(policy.engine)
    model = ServedModel(policy.policy, engine, renderer_for(tokenizer), tokenizer, scheduler, location)
    if policy.held:
        model.hold()
    return model, lost


async def _end_of_input() -> None:
    """Wait until standard input closes."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.read()


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
