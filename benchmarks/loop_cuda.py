"""Seconds of a whole GRPO step on a GPU beside TRL's GRPOTrainer with vLLM in its own process (`colocate`).

    python benchmarks/loop_cuda.py --model FOLDER --questions gsm8k/train.jsonl [--peer PYTHON]

One question, one answer, 256 completions a step by default; the same questions in the same order, the same limit of
tokens, temperature 1, one AdamW update a step, no KL, bfloat16 with float32 weights. Rewards are random on both sides,
so that every completion is trained on and, at this learning rate, lengths stay as they are. Leyden is `leyden train`
with its defaults: a server with a durable store, agents that ask with the `openai` client, the gateway, vLLM in a
process of its own. TRL takes the number of micro-batches that is the fastest in a trial before, or the one that is
given. `--peer` is a Python that has TRL and vLLM.

The last line is one JSON object; `ratio` is the median of TRL's seconds for 1,000 completion tokens over the median of
Leyden's, since completions end where they end.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import peer_trl as peer
import tomli_w
from loop_config import configuration
from reporting import add_out, report_result

from leyden.records import DEFAULT_POLICY
from leyden.trainer.report.metrics_log import read_metrics

SYSTEM = "Solve the problem step by step, then give the number after ####."
MICRO_BATCHES = (4, 8)
LEARNING_RATE = 1e-7


def measure_leyden(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with `leyden train`; return the seconds and completion tokens of each step that counts."""
    tasks = folder / "tasks.jsonl"
    rows = ({"id": str(number), "messages": messages} for number, messages in enumerate(plan["prompts"]))
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {"evaluation": {"every": 1000}, "checkpoints": {"every": 1000, "optimiser": False}, **plan["settings"]}
    config = configuration(plan, tasks, **{"home": str(folder / "runs"), "model": plan["model"], **sections})
    (folder / "loop.toml").write_text(tomli_w.dumps(config))
    subprocess.run([sys.executable, "-m", "leyden.cli", "train", folder / "loop.toml"], check=True, stdout=sys.stderr)
    steps = [row for row in read_metrics(folder / "runs" / "loop" / "metrics.jsonl", DEFAULT_POLICY) if row["step"] > 0]
    timed = slice(plan["warmup"] - 1, None)
    return {
        "step_s": [after["time"] - before["time"] for before, after in pairwise(steps)][timed],
        "completion_tokens": [int(row["tokens/sampled"]) for row in steps[1:]][timed],
        "parts_s": {
            name: round(statistics.fmean(row[f"time/{name}_s"] for row in steps[plan["warmup"] :]), 3)
            for name in ("sampling", "training", "publishing")
        },
    }


def summarise(found: dict[str, Any]) -> dict[str, float]:
    """Return medians over the steps of one side."""
    tokens = [
        1000 * seconds / count for seconds, count in zip(found["step_s"], found["completion_tokens"], strict=True)
    ]
    return {
        "step_s": round(statistics.median(found["step_s"]), 3),
        "s_per_1000_tokens": round(statistics.median(tokens), 4),
        "completion_tokens": round(statistics.median(found["completion_tokens"])),
        "steps": len(found["step_s"]),
    }


def main() -> None:
    """Measure both, print a table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with `question`")
    parser.add_argument("--peer", default=sys.executable, help="a Python with TRL and vLLM")
    parser.add_argument("--tasks", type=int, default=32, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="at most, of each completion")
    parser.add_argument("--warmup", type=int, default=3, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=8, help="steps that do")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=MICRO_BATCHES, help="that TRL may take")
    parser.add_argument("--cpu", action="store_true", help="both sides on the CPU, to try the script")
    parser.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="sections of Leyden's configuration")
    add_out(parser)
    options = parser.parse_args()
    names = ("tasks", "group", "tokens", "warmup", "steps", "model", "peer")
    lines = options.questions.read_text(encoding="utf-8").splitlines()[
        : options.tasks * (options.warmup + options.steps)
    ]
    plan = {
        **{name: getattr(options, name) for name in names},
        "cuda": not options.cpu,
        "threads": 1,
        "learning_rate": LEARNING_RATE,
        "settings": options.set,
        "prompts": [
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": json.loads(line)["question"]}]
            for line in lines
        ],
    }
    trials: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        ours = measure_leyden(plan, Path(folder))
        print(f"leyden {summarise(ours)}", flush=True)
        for parts in options.micro_batches if len(options.micro_batches) > 1 else ():
            trial = {**plan, "micro_batches": parts, "warmup": 1, "steps": 2}
            trials[parts] = min(peer.run(plan["peer"], trial, Path(folder))["step_s"])
            print(f"trial: trl {trials[parts]:.3f} s with {parts} micro-batches", flush=True)
        best = {**plan, "micro_batches": min(options.micro_batches, key=lambda one: trials.get(one, 0.0))}
        theirs = peer.run(plan["peer"], best, Path(folder))
    leyden, trl = summarise(ours), summarise(theirs)
    print(f"trl {trl}", flush=True)
    result = {
        "ratio": round(trl["s_per_1000_tokens"] / leyden["s_per_1000_tokens"], 2),
        "leyden": {**leyden, "parts_s": ours["parts_s"]},
        "trl": {
            **trl,
            "generating_s": round(statistics.median(theirs["generating_s"]), 3),
            "micro_batches": best["micro_batches"],
            "trials_s": trials,
        },
        **{name: plan[name] for name in ("tasks", "group", "tokens")},
    }
    report_result(result, options.out)


if __name__ == "__main__":
    main()
