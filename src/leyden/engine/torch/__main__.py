"""Runs an embedded engine as a child process: `python -m leyden.engine.torch`.

It reads its options and then orders to load weights as lines of JSON from standard input. It answers the options with
`null` when it can load, and each order with what it serves. It listens once it has weights, and ends when standard
input closes or its engine has failed. It ignores signals, which its parent handles.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
from asyncio import StreamReader, StreamWriter
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import torch
import uvloop
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from leyden.background import running
from leyden.engine.protocol import EngineLost
from leyden.engine.remote import EngineServer
from leyden.engine.torch.engine import TorchEngine
from leyden.engine.torch.shared_weights import read_any_weights
from leyden.engine.torch.sizing import choose_threads
from leyden.engine.torch.wire import EngineProcessOptions, EngineState, LoadWeights
from leyden.engine.vllm.extension.leyden_weights import checksum

log = logging.getLogger(__name__)

_GC_THRESHOLD = 20_000
"""New objects between two collections, in place of 700: most objects of a step are freed before one looks at them."""


def main() -> None:
    """Serve until standard input closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output goes to the log
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineProcessOptions)
    uvloop.run(_serve(options, answers))


async def _serve(options: EngineProcessOptions, answers: int) -> None:
    model = _build(options)
    engine = TorchEngine(
        model,
        slots=options.slots,
        threads=max(1, choose_threads(model) // options.replicas),
        tokenizer=options.tokenizer,
        dtype=model.dtype,
        kv_cache_bytes=_kv_cache_bytes(options),
    )

    gc.collect()
    gc.freeze()  # the objects of torch and transformers live as long as the process, so collections need not scan them
    gc.set_threshold(_GC_THRESHOLD)

    def answer(state: EngineState | None) -> None:
        os.write(answers, msgspec.json.encode(state) + b"\n")

    def state() -> EngineState:
        checksums = {name: checksum(parameter) for name, parameter in model.named_parameters()}
        return EngineState(engine.context_length, engine.vocab_size, checksums)

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        await EngineServer(engine, writer).serve(reader)

    engine.start()
    with closing(engine):
        async with running(_exit_with(engine)):
            answer(None)
            listening: asyncio.Server | None = None
            while line := await asyncio.to_thread(sys.stdin.buffer.readline):
                order = msgspec.json.decode(line, type=LoadWeights)
                load = partial(_load, model, order.folder)
                if engine.shares_parameters:
                    await engine.change_weights(load, order.version)
                else:  # it samples from a copy, which takes them between two steps
                    await asyncio.to_thread(load)
                    await engine.change_weights(lambda: None, order.version)
                loaded = await asyncio.to_thread(state)
                listening = listening or await asyncio.start_unix_server(serve, options.socket)
                answer(loaded)
        os._exit(0)  # its clients see that it is gone


async def _exit_with(engine: TorchEngine) -> None:
    """End the process when its engine has failed, so that another is started."""
    try:
        await engine.wait_failed()
    except EngineLost as error:
        log.error("%s", error)
        os._exit(1)


def _build(options: EngineProcessOptions) -> PreTrainedModel:
    """Return the model without its weights."""
    config = AutoConfig.from_pretrained(options.model)
    config._attn_implementation = None
    device = torch.device("cpu" if options.device_share is None else "cuda")
    if options.device_share is not None:  # torch keeps memory that it has freed
        torch.cuda.set_per_process_memory_fraction(options.device_share)
    with device, no_init_weights():  # random values would take a CPU a minute for each billion
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    model.tie_weights()
    model.eval()
    return model


def _kv_cache_bytes(options: EngineProcessOptions) -> int | None:
    """Return the most that the KV cache may have; None on a CPU."""
    if options.device_share is None:
        return None
    memory = int(options.device_share * torch.cuda.get_device_properties(0).total_memory)
    if memory <= options.beside_kv_cache:
        sys.exit(
            f"{memory / 2**30:.1f} GiB of the GPU are for this engine, and its weights, logits and activations take "
            f"{options.beside_kv_cache / 2**30:.1f}: raise `engine.memory`, or lower `engine.slots`"
        )
    return memory - options.beside_kv_cache


@torch.no_grad()
def _load(model: PreTrainedModel, folder: str) -> None:
    """Write the weights of a folder into the model."""
    parameters = dict(model.named_parameters())
    for name, tensor in read_any_weights(Path(folder)):
        parameters[name].copy_(tensor)


if __name__ == "__main__":
    main()
