"""A server whose model is served by vLLM at a socket; no token ends a completion before its length.

python benchmarks/engine_gateway.py HOME MODEL SOCKET CONTEXT_LENGTH VOCAB_SIZE
"""

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import uvloop
from msgspec.structs import replace
from scripted_server import started

from leyden.engine.protocol import EngineRequest, TokenChunk, VllmAddress
from leyden.engine.vllm.engine import VllmEngine
from leyden.rendering.factory import renderer_for
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.calls.scheduler import Scheduler
from leyden.server.gateway.served_model import ServedModel
from leyden.server.options import ServeOptions
from leyden.server.serve import serve

REQUESTS = 4096


class EndlessEngine(VllmEngine):
    """Samples to the length that a request allows."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample without stop tokens."""
        return super().generate(replace(request, stop_ids=()))


async def main(home: str, model: str, socket: str, context_length: str, vocab_size: str) -> None:
    """Serve until terminated."""
    tokenizer = Tokenizer.load(model)
    engine = EndlessEngine(VllmAddress(socket, int(context_length), int(vocab_size), REQUESTS))
    served = ServedModel("model", engine, renderer_for(tokenizer), tokenizer, Scheduler(slots=REQUESTS))
    try:
        await serve(ServeOptions(Path(home)), started, [served])
    finally:
        await engine.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
