"""Sampled tokens per second of the embedded engine, beside `model.generate` and transformers' continuous batching.

The bundled model on the CPU; 1, 32 and 256 requests that arrive at once, each with its own prompt, all of the same
lengths, at temperature 1. The time includes the prompts, which are new for every round. The contenders alternate, and
the best round of each counts. The engine and `model.generate` run with one thread (the engine's default for so small a
model) and with one a core. Continuous batching has one round, and a quarter of the tokens: it is slow.

    python benchmarks/engine.py

The last line is one JSON object; `ratio` is the engine as it is shipped (its default number of threads) over the better
of `model.generate` at 32 requests. `ratio_best_threads` is the same with the better number of threads for ours too.
"""

import argparse
import asyncio
import copy
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reporting import add_out, report_result
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import leyden
from leyden.engine.protocol import EngineRequest
from leyden.engine.torch.engine import TorchEngine
from leyden.records import Sampling

REQUESTS = (1, 32, 256)
SLOW = "continuous_batching"
Prompts = list[list[int]]


def load() -> Any:
    """Return the bundled model, or its shape with random weights where it is missing: its speed is the same."""
    folder = Path(leyden.__file__).parent / "models" / "spark"
    if (folder / "model.safetensors").exists():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        shape = {"vocab_size": 1024, "hidden_size": 192, "intermediate_size": 512, "max_position_embeddings": 4096}
        heads = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3}
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True))
    model.generation_config.eos_token_id = None
    return model.eval()


class Ours:
    """The embedded engine, with one coroutine per request."""

    def __init__(self, model: Any, requests: int, threads: int | None = None) -> None:
        self.engine = TorchEngine(model, slots=requests, threads=threads)

    def __call__(self, prompts: Prompts, tokens: int) -> int:
        """Sample completions; returns the number of sampled tokens."""

        async def complete(number: int, prompt: list[int]) -> int:
            request = EngineRequest(tuple(prompt), Sampling(seed=number), (), tokens, str(number))
            return sum([len(chunk.ids) async for chunk in self.engine.generate(request)])

        async def complete_all() -> int:
            return sum(await asyncio.gather(*(complete(number, prompt) for number, prompt in enumerate(prompts))))

        return asyncio.run(complete_all())


def generate(model: Any, threads: int) -> Callable[[Prompts, int], int]:
    """`model.generate` with this number of threads."""

    def run(prompts: Prompts, tokens: int) -> int:
        torch.set_num_threads(threads)
        ids = torch.tensor(prompts, device=model.device)
        config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=0)
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return int(answer[:, ids.shape[1] :].numel())

    return run


class ContinuousBatching:
    """Transformers' continuous batching, with a manager that is created in the warm-up and kept."""

    def __init__(self, model: Any) -> None:
        self.model = copy.deepcopy(model)  # it sets the model's attention to a paged one

    def __call__(self, prompts: Prompts, tokens: int) -> int:
        """Sample completions; returns the number of sampled tokens."""
        torch.set_num_threads(1)
        config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=tokens, eos_token_id=-1, pad_token_id=0)
        answers = self.model.generate_batch(prompts, generation_config=config, persistent_manager=True, warmup=False)
        return sum(len(answer.generated_tokens) for answer in answers.values())

    def close(self) -> None:
        """Free its cache, which takes most of the memory."""
        self.model.destroy_cached_continuous_batching_manager()


def measure(model: Any, requests: int, length: int, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per second of each contender; the best of its rounds."""
    cores = os.cpu_count() or 1
    engines = {"leyden": Ours(model, requests), "leyden_all_cores": Ours(model, requests, cores)}
    contenders: dict[str, Callable[[Prompts, int], int]] = {
        **engines,
        "generate": generate(model, 1),
        "generate_all_cores": generate(model, cores),
        SLOW: (peer := ContinuousBatching(model)),
    }
    best = dict.fromkeys(contenders, 0.0)
    for number in range(rounds):
        for name, run in contenders.items():
            if name == SLOW and number:
                continue
            wanted = tokens // 4 if name == SLOW else tokens
            warming, prompts = torch.randint(0, model.config.vocab_size, (2, requests, length)).tolist()
            run(warming, wanted if name == SLOW else 2)  # its manager is created for the first lengths it sees
            began = time.perf_counter()
            sampled = run(prompts, wanted)
            rate = sampled / (time.perf_counter() - began)
            if sampled != requests * wanted:
                raise SystemExit(f"{name} sampled {sampled} tokens of {requests * wanted}")
            best[name] = max(best[name], rate)
            print(f"{requests:4} requests  {name:20} {rate:9.0f} tokens/s", flush=True)
        peer.close()
    for ours in engines.values():
        ours.engine.close()
    return {name: round(rate, 1) for name, rate in best.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens sampled for each")
    parser.add_argument("--rounds", type=int, default=3)
    add_out(parser)
    options = parser.parse_args()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model = load()
    rates_by_load = {n: measure(model, n, options.prompt, options.tokens, options.rounds) for n in REQUESTS}
    shipped, best = {}, {}
    for requests, rates in rates_by_load.items():
        theirs = max(rates["generate"], rates["generate_all_cores"])
        shipped[requests] = round(rates["leyden"] / theirs, 2)
        best[requests] = round(max(rates["leyden"], rates["leyden_all_cores"]) / theirs, 2)
    result = {"ratio": shipped[32], "ratios": shipped, "ratio_best_threads": best[32], "ratios_best_threads": best}
    result |= {"tokens_per_s": rates_by_load}
    result |= {"prompt": options.prompt, "tokens": options.tokens, "cores": os.cpu_count()}
    report_result(result, options.out)


if __name__ == "__main__":
    main()
