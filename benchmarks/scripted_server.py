"""A server whose model answers at once: spark's tokenizer before an engine that plays the same tokens every time."""

import asyncio
import json
import sys
from importlib.resources import files
from pathlib import Path

import uvloop

from leyden.engine.scripted import ScriptedEngine
from leyden.rendering.factory import renderer_for
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.scheduler import Scheduler
from leyden.server.gateway.served_model import ServedModel
from leyden.server.options import RunningServer, ServeOptions
from leyden.server.serve import serve

ANSWER = "The answer is forty-two, as it has always been and will be for ever after, amen."


def scripted() -> ServedModel:
    """A model that says the same to everybody."""
    tokenizer = Tokenizer.load(str(files("leyden") / "models" / "spark"))
    ids = tokenizer.encode(ANSWER + "<|im_end|>")
    engine = ScriptedEngine(lambda _: ids, chunk_tokens=4)
    return ServedModel("model", engine, renderer_for(tokenizer), tokenizer, Scheduler(slots=4096))


def started(running: RunningServer) -> None:
    """Tell the benchmark where."""
    print(json.dumps({"url": running.url, "admin_key_file": running.admin_key_file}), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(ServeOptions(Path(sys.argv[1]), port=0), started, [scripted()]))
