"""Peak memory of logprobs and their gradient, beside the naive way that has all logits at once.

A head for a vocabulary of 151,936 over hidden states of 1,536 (those of Qwen2.5-1.5B), in bfloat16 on a GPU and in
single precision on a CPU. Both give the same logprobs and the same gradients; each is measured in its own process,
beyond the head, its gradient and the hidden states.

    python benchmarks/loss_memory.py

The last line is one JSON object; `ratio` is naive over ours in peak memory, `time_ratio` ours over naive in time.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from reporting import add_out, report_result
from torch import Tensor, nn

from leyden.rl.logprobs import logprobs

VOCABULARY, WIDTH = 151_936, 1536
ON_GPU = torch.cuda.is_available()


def naive(head: nn.Linear, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the whole matrix of logits, and of their logarithms."""
    scores = torch.log_softmax(head(hidden).float(), -1)
    with torch.no_grad():
        entropy = -(scores.exp() * scores).sum(-1)
    return scores.gather(-1, targets[:, None])[:, 0], entropy


def ours(head: nn.Linear, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Some at a time."""
    return logprobs(head, hidden, targets, torch.ones(len(targets), device=hidden.device), VOCABULARY)


def measure(way: str, tokens: int) -> dict[str, float]:
    """Return the second of two rounds."""
    torch.manual_seed(0)
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(tokens, WIDTH, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(VOCABULARY, (tokens,), device=device)
    head.weight.grad, hidden.grad = torch.zeros_like(head.weight), torch.zeros_like(hidden)
    before = torch.cuda.memory_allocated() if ON_GPU else _resident()
    for _ in range(2):
        began = time.perf_counter()
        found, entropy = (ours if way == "ours" else naive)(head, hidden, targets)
        found.mean().backward()
        if ON_GPU:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if ON_GPU else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert hidden.grad is not None
    return {
        "peak_mib": (peak - before) / 2**20,
        "seconds": seconds,
        "logprob": found.double().mean().item(),
        "entropy": entropy.double().mean().item(),
        "gradient": hidden.grad.double().norm().item(),
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def apart(way: str, tokens: int) -> dict[str, float]:
    """Return a measurement in its own process."""
    command = [sys.executable, __file__, "--one", way, "--tokens", str(tokens)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    """Both ways."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_384 if ON_GPU else 2048)
    parser.add_argument("--one", choices=["naive", "ours"], help=argparse.SUPPRESS)
    add_out(parser)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.tokens)))
        return
    found = {way: apart(way, options.tokens) for way in ("naive", "ours")}
    for way, one in found.items():
        numbers = f"logprob {one['logprob']:.6f}  gradient {one['gradient']:.6g}"
        print(f"{way:6} {one['peak_mib']:10.0f} MiB  {one['seconds']:7.3f} s  {numbers}")
    headline = {
        "ratio": round(found["naive"]["peak_mib"] / found["ours"]["peak_mib"], 2),
        "time_ratio": round(found["ours"]["seconds"] / found["naive"]["seconds"], 2),
        "tokens": options.tokens,
    }
    report_result(headline, options.out, torch=torch.__version__, ways=found)


if __name__ == "__main__":
    main()
