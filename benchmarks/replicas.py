"""Sampled tokens per second of one engine and of several replicas on the same device, and what a publication takes.

    python benchmarks/replicas.py --model FOLDER --replicas 1 2 --requests 64 256 1024 --out results/replicas
    python benchmarks/replicas.py --model qwen2.5-1.5b           # its shape with random weights: nothing to download
    python benchmarks/replicas.py --tokens 16 --prompt 32 --requests 8      # a CPU: embedded engines, the bundled model

Engines are started as `leyden eval` starts them, with `engine.replicas` and, on a GPU, `engine.devices` that name the
first one again and again: the memory plan divides it. They are asked as the server asks them, through the router of
replicas in one process, with token ids, streamed, with logprobs, at temperature 1. Every request has a prompt of its
own. The best of several rounds counts, after one that does not. `client` is the share of one core that the asking
process took: near 1, it is what limits. A publication holds the calls and sends all weights to every replica.

`ratio` is the rate of the most replicas over that of the fewest, at the most requests.
"""

import argparse
import asyncio
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engine_vllm import SHAPES
from reporting import add_out, report_result
from torch import Tensor
from transformers import AutoModelForCausalLM

from leyden.config import Config, read_config
from leyden.engine.protocol import Engine, EngineBackend, EngineRequest
from leyden.engine.remote import connected
from leyden.learner.checkpoint import tokenizer_files
from leyden.local.engines import running_engines
from leyden.local.policies import LocalPolicy, load_policy
from leyden.models.source import find_model
from leyden.records import Sampling

ON_GPU = torch.cuda.is_available()


class Weights:
    """Those of a policy, which do not change."""

    def __init__(self, policy: LocalPolicy) -> None:
        self._policy = policy

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights."""
        return ((name, parameter.detach()) for name, parameter in self._policy.model.named_parameters())

    def adapter(self) -> None:
        """Return None: there is none."""


def write_model(shape: str, folder: Path) -> Path:
    """Write a model of a shape with random weights, and the bundled model's tokenizer, whose tokens it has too."""
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(SHAPES[shape], dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in tokenizer_files(find_model("spark", ".").folder):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def config_of(model: str, replicas: int, given: argparse.Namespace) -> Config:
    """Return the configuration of a run that would serve this."""
    engine: dict[str, Any] = {"replicas": replicas, "kind": given.engine}
    engine |= {"slots": given.slots} if given.slots else {}
    if ON_GPU and replicas > 1:
        engine["devices"] = [0] * replicas
    return read_config({"run": "replicas", "agent": "a:b", "tasks": "t", "model": model, "engine": engine})


async def ask(engine: Engine, count: int, given: argparse.Namespace) -> tuple[float, float]:
    """Make so many requests at once; return tokens per second, and the share of a core that this process took."""
    prompts = [tuple(random.randrange(engine.vocab_size) for _ in range(given.prompt)) for _ in range(count)]

    async def complete(number: int) -> int:
        asked = EngineRequest(prompts[number], Sampling(temperature=1.0), (), given.tokens, f"s{number}")
        sampled = sum([len(chunk.ids) async for chunk in engine.generate(asked)])
        engine.end_session(asked.session)
        return sampled

    began, cpu = time.perf_counter(), time.process_time()
    sampled = sum(await asyncio.gather(*map(complete, range(count))))
    seconds = time.perf_counter() - began
    if sampled != count * given.tokens:
        raise SystemExit(f"{sampled} tokens were sampled where {count * given.tokens} were asked for")
    return sampled / seconds, (time.process_time() - cpu) / seconds


async def publish(engine: Engine, backend: EngineBackend, policy: LocalPolicy, version: int) -> float:
    """Publish the weights as a new version; return the seconds in which nothing was sampled."""
    engine.hold()
    async with backend.changing_weights(version):
        pass
    publication = await backend.publish(Weights(policy), version)
    engine.resume(version)
    return publication.seconds


async def measure(policy: LocalPolicy, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of engines that serve a policy."""
    began = time.perf_counter()
    async with running_engines(folder, [policy]) as engines:
        backend = engines[policy.name]
        started = time.perf_counter() - began
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(backend.serve(*await asyncio.open_unix_connection(sock=theirs)))
        rates: dict[int, float] = {}
        shares: dict[int, float] = {}
        async with connected(backend.address, *await asyncio.open_unix_connection(sock=ours)) as (engine, _):
            for count in given.requests:
                rounds = [await ask(engine, count, given) for _ in range(given.rounds + 1)]
                rates[count], shares[count] = max(rounds[1:])
            published = [await publish(engine, backend, policy, version) for version in range(1, given.rounds + 2)]
        serving.cancel()
    return {
        "started_s": round(started, 1),
        "tokens_per_s": {count: round(rate, 1) for count, rate in rates.items()},
        "client": {count: round(share, 2) for count, share in shares.items()},
        "publish_s": round(min(published[1:]), 3),
    }


def print_table(found: dict[int, dict[str, Any]]) -> None:
    """Print a line for each number of replicas."""
    columns = [*next(iter(found.values()))["tokens_per_s"]]
    header = "".join(f"{f'{count} at once':>16}" for count in columns)
    print(f"{'replicas':8}{header}  tokens/s (client)    publishing    start")
    for replicas, one in found.items():
        cells = "".join(f"{one['tokens_per_s'][count]:9.0f} ({one['client'][count]:.2f})" for count in columns)
        print(f"{replicas:<8}{cells}{'':21}{one['publish_s']:8.3f} s {one['started_s']:7.1f} s", flush=True)


def main() -> None:
    """Measure every number of replicas and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="spark", help="a model, a folder, or the name of a shape")
    parser.add_argument("--engine", choices=("auto", "vllm", "torch"), default="auto")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256, 1024] if ON_GPU else [16])
    parser.add_argument("--prompt", type=int, default=300, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=100, help="tokens sampled for each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, help="`engine.slots`")
    add_out(parser)
    given = parser.parse_args()
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(write_model(given.model, folder / "model")) if given.model in SHAPES else given.model
        for replicas in given.replicas:
            policy = load_policy(config_of(model, replicas, given))
            found[replicas] = asyncio.run(measure(policy, given, folder))
            print(f"{replicas} replicas: {found[replicas]}", flush=True)
    print_table(found)
    most = max(given.requests)
    rates = [found[number]["tokens_per_s"][most] for number in (min(found), max(found))]
    result = {"ratio": round(rates[1] / rates[0], 3), "model": Path(given.model).name, "replicas": found}
    report_result(result, given.out, torch=torch.__version__)


if __name__ == "__main__":
    main()
