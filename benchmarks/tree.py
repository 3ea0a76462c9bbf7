"""Forward and backward of a group's calls: as a prefix tree, one sample a call, and with calls of a rollout merged.

The calls are of real runs (`tree_runs/`, recorded by `tree_record.py`): an agent of ten turns with a tool in a group of
8, one of three roles (write, check, correct) in a group of 8, and a single turn in a group of 16. `merged` is what
others do: a call that is a prefix of another is computed with it. All three go through the same code with the same
budget of tokens at once, and give the same gradient; the tree's work may not be less than its distinct tokens,
so naive over distinct tokens is the limit of its speed-up. Where a tree would share little more than merging does, the
trainer lays out merged samples, whose attention is faster, and so does `tree` here; `forced` always lays out a tree.

    python benchmarks/tree.py                                  # a model of two million parameters on the CPU
    python benchmarks/tree.py --model smollm2-135m qwen2.5-1.5b  # their shapes, random weights, bfloat16, on a GPU

Peak memory is beyond weights and gradients. The last line is one JSON object: `ratio` is one sequence a call over the
tree in time for the agent of ten turns (of the last model named), `of_limit` that ratio's share of the limit, and
`merged_over_tree` the worst of the three runs. Every line says which layout was computed (`layout`: what `tree` chose
for the run) and how much faster than one sequence a call merging alone would have been (`merging_alone`).
"""

import argparse
import gzip
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from reporting import add_out, report_result
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import leyden
from leyden.config import Hyperparameters, TrainingConfig
from leyden.learner.microbatch import MicroBatch, _lines, _sequences
from leyden.learner.objective import Objective
from leyden.learner.policy import Policy
from leyden.learner.protocol import OldLogprobs
from leyden.learner.sample import Sample
from leyden.rl.loss.ppo_clip import ppo_clip
from leyden.rl.pack import Cost, merge_prefixes
from leyden.rl.tree import build_tree

HERE = Path(__file__).parent
RUNS = ("ten_turns", "three_roles", "one_turn")
WAYS = ("rows", "merged", "tree", "forced")
OBJECTIVE = Objective(ppo_clip, Hyperparameters())
SHAPES: dict[str, Any] = {
    "smollm2-135m": LlamaConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": Qwen2Config(
        vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
    ),
}  # fmt: skip


class Forced(Policy):
    """A policy that lays out trees, however little they share."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._cost = replace(self._cost, tree_token=0.0)


def line_microbatches(samples: Sequence[Sample], cost: Cost) -> Iterator[MicroBatch]:
    """Lay out sequences; a sample that is a prefix of another shares its sequence."""
    sequences = _sequences(samples)
    return _lines(samples, sequences, merge_prefixes(sequences), cost)


class Merging(Policy):
    """A policy that computes a call together with one that it is a prefix of, and shares nothing else."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._microbatches = line_microbatches


def load_samples(run: str, copies: int) -> list[Sample]:
    """Return the calls of a recorded run, as the trainer has them: `copies` groups, each with other tokens."""
    rollouts = json.loads(gzip.decompress((HERE / "tree_runs" / f"{run}.json.gz").read_bytes()))
    samples = []
    for copy in range(copies):
        for number, calls in enumerate(rollouts):
            prompts: dict[str, tuple[int, ...]] = {}
            done: dict[str, tuple[int, ...]] = {}
            for turn, call in enumerate(calls):
                kept = done[call["parent"]][: call["kept_ids"]] if call["parent"] else ()
                prompts[call["id"]] = (*kept, *((token + copy) % 1000 for token in call["prompt_ids"]))
                completion = tuple((token + copy) % 1000 for token in call["completion_ids"])
                done[call["id"]] = (*prompts[call["id"]], *completion)
                samples.append(
                    Sample(
                        call=call["id"],
                        rollout=copy * len(rollouts) + number,
                        call_index=turn,
                        prompt_ids=prompts[call["id"]],
                        completion_ids=completion,
                        token_indices=range(len(completion)),
                        sampler_logprobs=(-1.0,) * len(completion),
                        temperature=1.0,
                        advantage=1.0 - 2.0 * (number % 2),
                        weight=1.0 / (len(rollouts) * copies * len(completion)),
                    )
                )
    return samples


def load_model(name: str) -> Any:
    """Return the bundled model, or one of a known shape on the GPU."""
    torch.manual_seed(0)
    if name == "spark":
        return AutoModelForCausalLM.from_pretrained(
            Path(leyden.__file__).parent / "models" / "spark", dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
    kind = LlamaForCausalLM if isinstance(SHAPES[name], LlamaConfig) else Qwen2ForCausalLM
    with torch.device("cuda"):
        return kind(SHAPES[name]).to(torch.bfloat16).eval()


def policies(model: Any, tokens: int) -> dict[str, Policy]:
    """Return a policy of the same model for each way."""
    kinds = {"merged": Merging, "forced": Forced}
    return {
        way: kinds.get(way, Policy)(
            model, TrainingConfig(layout="tree" if way in ("tree", "forced") else "rows", batch_tokens=tokens)
        )
        for way in WAYS
    }


def measure(name: str, run: str, copies: int, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Measure the ways in turn; of each the best round counts, and the first also compiles."""
    samples, model = load_samples(run, copies), load_model(name)
    found: dict[str, dict[str, float]] = {}
    for turn in range(rounds + 1):
        for way, policy in policies(model, tokens).items():
            began = time.perf_counter()
            metrics = policy.accumulate(samples, OldLogprobs(), OBJECTIVE)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            best = min(seconds, found[way]["seconds"]) if turn > 1 else seconds
            found[way] = {"seconds": best, "computed": metrics.computed, "grad_norm": metrics.grad_norm}
            policy.optimiser.zero_grad()
    for way, policy in policies(model, tokens).items():
        on_gpu = model.device.type == "cuda"
        found[way]["peak_mib"] = peak_mib(policy, samples) if on_gpu else apart(name, run, way, copies, tokens)
    return found


def peak_mib(policy: Policy, samples: Sequence[Sample]) -> float:
    """Return the most memory that is taken on the way, beyond weights and gradients."""
    policy.accumulate(samples[:1], OldLogprobs(), OBJECTIVE)  # so that gradients are there
    if policy.model.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        policy.accumulate(samples, OldLogprobs(), OBJECTIVE)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    before = _resident()
    policy.accumulate(samples, OldLogprobs(), OBJECTIVE)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 2**20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def apart(*arguments: object) -> float:
    """Return the memory of one way in its own process."""
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def compare(name: str, run: str, copies: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Compare all ways on one run."""
    ways = measure(name, run, copies, rounds, tokens)
    tree, samples, merged = ways["tree"], ways["rows"], ways["merged"]
    calls = [(*sample.prompt_ids, *sample.completion_ids) for sample in load_samples(run, copies)]
    ratio, limit = samples["seconds"] / tree["seconds"], sum(map(len, calls)) / len(build_tree(calls).ids)
    summary = {
        "ratio": round(ratio, 2),
        "limit": round(limit, 2),
        "of_limit": round(ratio / limit, 3),
        "merged_over_tree": round(merged["seconds"] / tree["seconds"], 2),
        "forced_over_tree": round(ways["forced"]["seconds"] / tree["seconds"], 2),
        "layout": "merged samples" if tree["computed"] == merged["computed"] else "trees",
        "merging_alone": round(samples["seconds"] / merged["seconds"], 2),
        "memory_rows_over_tree": round(samples["peak_mib"] / tree["peak_mib"], 2),
    }
    layouts = {"rows": "one sequence a call", "merged": "merged samples", "tree": summary["layout"], "forced": "trees"}
    for way, each in ways.items():
        print(
            f"{name:13} {run:12} {way:7} {each['seconds'] * 1000:9.1f} ms {each['peak_mib']:9.1f} MiB  "
            f"layout: {layouts[way]}; {samples['seconds'] / each['seconds']:.2f} times as fast as rows, "
            f"merging alone {summary['merging_alone']:.2f}"
        )
    print(f"{name:13} {run:12} {summary}", flush=True)
    return {"model": name, "run": run, "copies": copies, **summary, "ways": ways}


def main() -> None:
    """Measure every model on every run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=["spark", *SHAPES], default=["spark"])
    parser.add_argument("--copies", type=int, default=1, help="groups at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TrainingConfig().batch_tokens, help="at once")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    add_out(parser)
    options = parser.parse_args()
    if options.one:
        name, run, way, copies, tokens = options.one
        print(peak_mib(policies(load_model(name), int(tokens))[way], load_samples(run, int(copies))))
        return
    found = [
        compare(name, run, options.copies, options.rounds, options.tokens) for name in options.model for run in RUNS
    ]
    last = {one["run"]: one for one in found if one["model"] == options.model[-1]}
    headline = {
        **{key: last["ten_turns"][key] for key in ("ratio", "limit", "of_limit", "layout", "merging_alone")},
        "merged_over_tree": min(one["merged_over_tree"] for one in last.values()),
        "model": options.model[-1],
    }
    report_result(headline, options.out, torch=torch.__version__, runs=found)


if __name__ == "__main__":
    main()
