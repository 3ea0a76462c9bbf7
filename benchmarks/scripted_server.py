"""A server whose models play the same tokens every time, behind spark's tokenizer.

scripted_server.py HOME                     one model, which answers at once
scripted_server.py HOME slow                `model` takes a quarter of a second and answers 48 calls at once, and
                                            `long` streams answers of 4,000 tokens for 50 s
scripted_server.py HOME replicas            four replicas of `model`, which takes a tenth of a second
scripted_server.py HOME caller ARGUMENTS    a second model, `caller`, calls the tool `check` with these arguments
"""

import asyncio
import json
import sys
from importlib.resources import files
from pathlib import Path

import uvloop

from leyden.engine.router import ReplicaRouter
from leyden.rendering.factory import renderer_for
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.calls.scheduler import Scheduler
from leyden.server.gateway.served_model import ServedModel
from leyden.server.options import RunningServer, ServeOptions
from leyden.server.serve import serve

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from scripted_engine import ScriptedEngine

ANSWER = "The answer is forty-two, as it has always been and will be for ever after, amen."
LONG_ANSWER_TOKENS = 4_000


def scripted() -> ServedModel:
    """Return a model that says the same to everybody."""
    tokenizer = _tokenizer()
    return _served("model", tokenizer, tokenizer.encode(ANSWER + "<|im_end|>"), chunk_tokens=4, delay_s=0.0, slots=4096)


def slow() -> list[ServedModel]:
    """Models whose answers take time or are long."""
    tokenizer = _tokenizer()
    short = tokenizer.encode(ANSWER + "<|im_end|>")
    long = (tokenizer.encode(ANSWER) * LONG_ANSWER_TOKENS)[:LONG_ANSWER_TOKENS]
    return [
        _served("model", tokenizer, short, chunk_tokens=len(short), delay_s=0.25, slots=48),
        _served("long", tokenizer, long, chunk_tokens=40, delay_s=0.5, slots=1024),
    ]


def replicas() -> ServedModel:
    """Return a model that several engines serve."""
    tokenizer = _tokenizer()
    ids = tokenizer.encode(ANSWER + "<|im_end|>")
    engines = [ScriptedEngine(lambda _: ids, len(ids), 0.1, keep_requests=False) for _ in range(4)]
    return ServedModel("model", ReplicaRouter(engines), renderer_for(tokenizer), tokenizer, Scheduler(slots=4096))


def caller(arguments: str) -> ServedModel:
    """Return a model that always makes the same tool call."""
    tokenizer = _tokenizer()
    call = f'<tool_call>\n{{"name": "check", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    return _served("caller", tokenizer, tokenizer.encode(call), chunk_tokens=1000, delay_s=0.0, slots=4096)


def _tokenizer() -> Tokenizer:
    return Tokenizer.load(str(files("leyden") / "models" / "spark"))


def _served(
    name: str, tokenizer: Tokenizer, ids: list[int], *, chunk_tokens: int, delay_s: float, slots: int
) -> ServedModel:
    engine = ScriptedEngine(lambda _: ids, chunk_tokens, delay_s, keep_requests=False)
    return ServedModel(name, engine, renderer_for(tokenizer), tokenizer, Scheduler(slots=slots))


def started(running: RunningServer) -> None:
    """Tell the benchmark where."""
    print(json.dumps({"url": running.url, "admin_key_file": running.admin_key_file}), flush=True)


if __name__ == "__main__":
    match sys.argv[2:]:
        case ["slow"]:
            models = slow()
        case ["replicas"]:
            models = [replicas()]
        case ["caller", arguments]:
            models = [scripted(), caller(arguments)]
        case _:
            models = [scripted()]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(ServeOptions(Path(sys.argv[1])), started, models))
