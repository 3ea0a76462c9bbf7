"""Trains all weights of a 7B model with the optimiser in host memory: memory of GPU and host, seconds of an update.

The model has the shape of Qwen2.5-7B and random weights, made on the device; samples are groups of rollouts that share
a prompt. `ratio` is the time of an update over that of its gradient alone: what optimiser and transfers cost.
`--offload none` trains without, and `--layers 2 --width 64 --device cpu` tries the script on a CPU.
"""

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from fsdp_cuda import random_samples
from reporting import add_out, report_result
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from leyden.config import Hyperparameters, TrainingConfig
from leyden.learner.memory import memory_for_training
from leyden.learner.objective import Objective
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs
from leyden.process.resources import free_memory
from leyden.rl.loss.reinforce import reinforce

WARM_UP = 2
"""Updates that are not timed: layers are compiled in the first, and the optimiser makes its moments."""
GIB = 2**30


def random_model(options: argparse.Namespace) -> PreTrainedModel:
    """A model in bfloat16, on the device from the beginning."""
    torch.manual_seed(0)
    heads = max(4, options.width // 128)
    config = Qwen2Config(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.width * 37 // 7,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    with torch.device(options.device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def seconds(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    """Return how long something takes, with all that it starts on the device, and its result."""
    started = time.perf_counter()
    found = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def time_steps(optimiser: torch.optim.Optimizer) -> list[float]:
    """Return a list to which each step of the optimiser will add its seconds."""
    started, found = [0.0], list[float]()

    def start(*_: Any) -> None:
        started[0] = time.perf_counter()

    optimiser.register_step_pre_hook(start)
    optimiser.register_step_post_hook(lambda *_: found.append(time.perf_counter() - started[0]))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make some updates."""
    free_before = free_memory()
    training = TrainingConfig(
        learning_rate=1e-6,
        batch_tokens=options.batch_tokens,
        gradient_checkpointing=options.gradient_checkpointing,
        offload=options.offload,
    )
    made, model = seconds(lambda: random_model(options), options.device)
    planned = memory_for_training(model, "bfloat16", training, reference=False)
    copied, policy = seconds(lambda: Policy(model, training), options.device)
    print(f"{model.num_parameters() / 1e9:.3f} billion parameters, made in {made:.1f} s, masters in {copied:.1f} s")
    objective, steps = Objective(reinforce, Hyperparameters()), time_steps(policy.optimiser)
    parts: dict[str, list[float]] = {"gradient": [], "apply": [], "adamw": []}
    losses, tokens, least_free = [], [], free_before
    for number in range(WARM_UP + options.updates):
        samples = random_samples(
            options.vocabulary, options.groups, options.size, options.prompt, options.completion, number
        )
        steps.clear()
        gradient, metrics = seconds(partial(policy.accumulate, samples, OldLogprobs(), objective), options.device)
        apply, _ = seconds(partial(policy.apply, metrics.grad_norm), options.device)
        for part, value in zip(parts, (gradient, apply, sum(steps)), strict=True):
            parts[part].append(value)
        losses.append(metrics.loss)
        tokens.append(metrics.computed)
        least_free = min(least_free, free_memory())
        print(f"update {number}: gradient {gradient:.2f} s, optimiser {apply:.2f} s (AdamW {sum(steps):.2f} s)")
    timed = {part: median(values[WARM_UP:]) for part, values in parts.items()}
    on_gpu = options.device == "cuda"
    update = timed["gradient"] + timed["apply"]
    return {
        "ratio": round(update / timed["gradient"], 2),
        "parameters": model.num_parameters(),
        "offload": options.offload,
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
        "gpu_planned_gib": planned.device / GIB,
        "host_taken_gib": (free_before - least_free) / GIB,
        "host_peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "host_planned_gib": planned.host / GIB,
        "gradient_s": timed["gradient"],
        "apply_s": timed["apply"],
        "adamw_s": timed["adamw"],
        "update_s": update,
        "tokens_an_update": median(tokens),
        "threads": torch.get_num_threads(),
        "losses": losses,
    }


def main() -> None:
    """Measure one way."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if on_gpu else "cpu")
    parser.add_argument("--offload", choices=["optimiser", "none"], default="optimiser")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--vocabulary", type=int, default=152_064 if on_gpu else 256)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--groups", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512 if on_gpu else 32)
    parser.add_argument("--completion", type=int, default=512 if on_gpu else 32)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    add_out(parser)
    options = parser.parse_args()
    report_result(measure(options), options.out, torch=torch.__version__)


if __name__ == "__main__":
    main()
