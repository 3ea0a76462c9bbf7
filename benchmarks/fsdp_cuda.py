"""Trains a model on one GPU by the plain learner and by one rank of FSDP2: same losses? And how much time for each?

    python benchmarks/fsdp_cuda.py --profile --out results/fsdp_cuda

The model has the shape of Qwen2.5-1.5B and random weights; samples are groups of rollouts that share a prompt. Each way
is a process of its own, one after the other, on a machine that does nothing else. Seconds are medians over the updates
after the first two, those of the gradient and of the optimiser apart; `host` is the share of one core that the process
took meanwhile: near 1, the host is what limits. With `--profile` one more update names the kernels that took longest.
`ratio` is the time of an update by FSDP over that by the plain learner.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from reporting import add_out, report_result
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from leyden.config import Hyperparameters, TrainingConfig
from leyden.learner.objective import Objective
from leyden.learner.peers import ALONE, Peers
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs
from leyden.learner.ranks.messages import World
from leyden.learner.ranks.peers import RankPeers
from leyden.learner.sample import Sample
from leyden.rl.loss.reinforce import reinforce

SHAPES: dict[str, dict[str, int]] = {
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
KERNELS = 15
"""Of a profile."""
WARM_UP = 2
"""Updates that are not timed: layers are compiled in the first, and the optimiser has moments after it."""
ON_GPU = torch.cuda.is_available()


def random_model(shape: str, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in any precision: rounded to bfloat16."""
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True)
    with torch.device("cuda" if ON_GPU else "cpu"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # `to` of the model would round its table of positions as well
    return model.eval()


def random_samples(vocabulary: int, groups: int, size: int, prompt: int, completion: int, seed: int) -> list[Sample]:
    """Single calls in groups that share a prompt, with advantages that add up to nothing."""
    rng = Random(seed)
    samples = []
    for group in range(groups):
        shared = tuple(rng.randrange(vocabulary) for _ in range(prompt))
        for index in range(size):
            tokens = rng.randint(completion // 2, completion)
            samples.append(
                Sample(
                    call=f"{group}-{index}",
                    rollout=group * size + index,
                    call_index=0,
                    prompt_ids=shared,
                    completion_ids=tuple(rng.randrange(vocabulary) for _ in range(tokens)),
                    token_indices=range(tokens),
                    sampler_logprobs=(-1.0,) * tokens,
                    temperature=1.0,
                    advantage=1.0 if index % 2 else -1.0,
                    weight=1.0 / (tokens * groups * size),
                )
            )
    return samples


def train(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make some updates; return their losses and seconds, and the peak of memory. A last one may be profiled."""
    device = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
    peers: Peers = ALONE
    if way == "fsdp":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ranks = RankPeers(World(0, 1, str(Path(tempfile.mkdtemp()) / "meeting"), 60.0), device)
        ranks.compute_dtype = torch.bfloat16
        peers = ranks
    model = random_model(options.shape, torch.bfloat16 if way == "plain" else torch.float32)
    policy = Policy(model, TrainingConfig(learning_rate=1e-6, batch_tokens=options.batch_tokens), peers=peers)
    objective = Objective(reinforce, Hyperparameters())
    losses, norms = [], []
    timed: dict[str, list[float]] = {"seconds": [], "gradient": [], "optimiser": [], "host": []}
    for step in range(WARM_UP + options.updates + options.profile):
        samples = random_samples(
            SHAPES[options.shape]["vocab_size"],
            options.groups,
            options.size,
            options.prompt,
            options.completion,
            step,
        )
        profiled = step == WARM_UP + options.updates
        with torch.profiler.profile() if profiled else nullcontext() as profile:
            started, cpu = time.perf_counter(), time.process_time()
            metrics = policy.accumulate(samples, OldLogprobs(), objective)  # which reads its norm
            accumulated = time.perf_counter()
            policy.apply(metrics.grad_norm)
            if ON_GPU:
                torch.cuda.synchronize()
            ended = time.perf_counter()
        if profile is not None:
            order = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
            print(
                f"{way}:\n" + profile.key_averages().table(sort_by=order, row_limit=KERNELS, max_name_column_width=60)
            )
            break
        parts = (ended - started, accumulated - started, ended - accumulated)
        for name, value in zip(timed, (*parts, (time.process_time() - cpu) / parts[0]), strict=True):
            timed[name].append(value)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
    peak = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
    return {"losses": losses, "norms": norms, **timed, "peak_gib": peak}


def apart(way: str) -> dict[str, Any]:
    """Return a measurement in its own process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--one", way]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    *shown, found = output.splitlines()
    print("\n".join(shown), flush=True)
    return json.loads(found)


def main() -> None:
    """Both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b" if ON_GPU else "tiny")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--groups", type=int, default=8 if ON_GPU else 2)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512 if ON_GPU else 32)
    parser.add_argument("--completion", type=int, default=512 if ON_GPU else 32)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--profile", action="store_true", help="name the kernels that take longest")
    parser.add_argument("--one", choices=["plain", "fsdp"], help=argparse.SUPPRESS)
    add_out(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(train(options.one, options)))
        return
    found = {way: apart(way) for way in ("plain", "fsdp")}
    timed = {way: median(one["seconds"][WARM_UP:]) for way, one in found.items()}
    pairs = list(zip(found["plain"]["losses"], found["fsdp"]["losses"], strict=True))
    for number, (plain, fsdp) in enumerate(pairs):
        print(f"loss of update {number}: plain {plain:+.6f}, fsdp {fsdp:+.6f}")
    print(f"{'':6}{'an update':>11}{'gradient':>11}{'optimiser':>11}{'host':>7}{'peak':>10}")
    for way, one in found.items():
        gradient, optimiser, host = (median(one[part][WARM_UP:]) for part in ("gradient", "optimiser", "host"))
        print(f"{way:6}{timed[way]:9.3f} s{gradient:9.3f} s{optimiser:9.3f} s{host:7.2f}{one['peak_gib']:6.1f} GiB")
    headline = {
        "ratio": round(timed["fsdp"] / timed["plain"], 3),
        "largest_difference_of_losses": max(abs(one - other) for one, other in pairs),
        "largest_loss": max(abs(one) for one, _ in pairs),
    }
    report_result(headline, options.out, torch=torch.__version__, ways=found)


if __name__ == "__main__":
    main()
