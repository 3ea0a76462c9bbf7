"""Seconds of a whole GRPO step on a GPU beside TRL's GRPOTrainer with vLLM in its own process (`colocate`).

    python benchmarks/loop_cuda.py --model FOLDER --questions gsm8k/train.jsonl [--peer PYTHON]

or its parts one by one, each of which keeps what it found in `--out`, one file a setting, until `table` compares them:

    python benchmarks/loop_cuda.py leyden --model FOLDER --questions FILE
    python benchmarks/loop_cuda.py trl --model FOLDER --questions FILE --settings 8 8,layers 4,layers --limit-s 300
    python benchmarks/loop_cuda.py table

One question, one answer, 256 completions a step by default; questions of the same file, the same limit of tokens,
temperature 1, one AdamW update a step, no KL, bfloat16 with float32 weights. Rewards are random on both sides,
so that every completion is trained on and, at this learning rate, lengths stay as they are. Leyden is `leyden train`
with its defaults (a server with a durable store, agents that ask with the `openai` client, the gateway) and the
embedded engine, or with `--engine vllm` vLLM in a process of its own. TRL is measured with several settings
(`MICRO_BATCHES[,whole|,layers][,uncorrected]`, see peer_trl.py), and its fastest counts. `--peer` is a Python that has
TRL and vLLM.

The last line of `table` is one JSON object. `ratio` is the median of the seconds of TRL's fastest setting for 1,000
completion tokens over the median of Leyden's, since completions end where they end; `ratio_uncorrected` is the same for
TRL without the correction for sampling with vLLM, which both make by default. Steps that do not count are warm-up:
`first_step_s` is the first, and `compile_s` is how much longer than steady steps all of them took together.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import peer_trl as peer
import tomli_w
from loop_config import configuration
from reporting import report_result

from leyden.orchestrator.report.metrics_log import read_metrics
from leyden.records import DEFAULT_POLICY

SYSTEM = "Solve the problem step by step, then give the number after ####."
RESULTS = Path(__file__).parents[1] / "results" / "loop_cuda"
SETTINGS = ("8", "8,layers", "4,layers", "4", "8,whole", "8,layers,uncorrected", "16,layers")
"""Of TRL, those first that are most likely its fastest: a limit of time cuts the others off."""
LEARNING_RATE = 1e-7
ASKED = ("tasks", "group", "tokens")


def measure_leyden(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with `leyden train`; return the seconds and completion tokens of each step that counts."""
    tasks = folder / "tasks.jsonl"
    rows = ({"id": str(number), "messages": messages} for number, messages in enumerate(plan["prompts"]))
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {"evaluation": {"every": 1000}, "checkpoints": {"every": 1000, "optimiser": False}, **plan["sections"]}
    config = configuration(plan, tasks, **{"home": str(folder / "runs"), "model": plan["model"], **sections})
    (folder / "loop.toml").write_text(tomli_w.dumps(config))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}  # nothing is compiled already
    command = [sys.executable, "-m", "leyden", "train", folder / "loop.toml"]
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)
    steps = [row for row in read_metrics(folder / "runs" / "loop" / "metrics.jsonl", DEFAULT_POLICY) if row["step"] > 0]
    first_s = sum(steps[0][f"time/{part}_s"] for part in ("sampling", "training", "publishing"))
    took = [first_s, *(after["time"] - before["time"] for before, after in pairwise(steps))]
    timed = slice(plan["warmup"], None)
    return {
        "warmup_s": took[: plan["warmup"]],
        "step_s": took[timed],
        "completion_tokens": [int(row["tokens/sampled"]) for row in steps[timed]],
        "parts_s": {
            name: round(statistics.fmean(row[f"time/{name}_s"] for row in steps[timed]), 3)
            for name in ("sampling", "training", "publishing")
        },
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Return medians over the steps of one side, and what its first steps took beyond them."""
    steady = statistics.median(found["step_s"])
    tokens = [
        1000 * seconds / count for seconds, count in zip(found["step_s"], found["completion_tokens"], strict=True)
    ]
    return {
        "step_s": round(steady, 3),
        "s_per_1000_tokens": round(statistics.median(tokens), 4),
        "completion_tokens": round(statistics.median(found["completion_tokens"])),
        "steps": len(found["step_s"]),
        "first_step_s": round(found["warmup_s"][0], 3),
        "compile_s": round(sum(found["warmup_s"]) - len(found["warmup_s"]) * steady, 3),
    }


def read_setting(text: str) -> dict[str, Any]:
    """Return a setting of TRL as the peer reads it."""
    parts, *words = text.split(",")
    if not parts.isdigit() or set(words) - {"whole", "layers", "uncorrected"} or {"whole", "layers"} <= set(words):
        raise argparse.ArgumentTypeError(f"{text!r} is not MICRO_BATCHES[,whole|,layers][,uncorrected]")
    compiled = next((word for word in words if word != "uncorrected"), "none")
    return {"micro_batches": int(parts), "compile": compiled, "correction": "uncorrected" not in words}


def name_setting(setting: dict[str, Any]) -> str:
    """Return the name of a setting's file."""
    compiled = [] if setting["compile"] == "none" else [setting["compile"]]
    return "-".join([str(setting["micro_batches"]), *compiled, *([] if setting["correction"] else ["uncorrected"])])


def measure_trl(plan: dict[str, Any], settings: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Measure settings until the time is up, and keep each.

    One that ends TRL's process is tried again in a process of its own before it counts as failed.
    """
    began, left = time.monotonic(), list(settings)
    with tempfile.TemporaryDirectory() as folder:
        while left:
            limit_s = options.limit_s - (time.monotonic() - began)
            if limit_s <= 0:
                break
            before = len(left)
            for found in peer.run(options.peer, {**plan, "settings": list(left)}, Path(folder), limit_s):
                keep_trl(found, plan, options.out)
                left.pop(0)
            if len(left) == before and time.monotonic() - began < options.limit_s:
                keep_trl({"setting": left.pop(0), "failed": "TRL's process ended"}, plan, options.out)
    for setting in left:
        print(f"not measured within {options.limit_s:.0f} s: trl {name_setting(setting)}", flush=True)


def keep_trl(found: dict[str, Any], plan: dict[str, Any], out: Path) -> None:
    """Print and keep what was found of one setting."""
    result = {"setting": found["setting"], **{name: plan[name] for name in ASKED}}
    if "failed" in found:
        result["failed"] = found["failed"]
    else:
        result |= summarise(found)
        for part in ("generating_s", "scoring_s"):
            result[part] = round(statistics.median(found[part]), 3)
    report_result(result, out, f"trl-{name_setting(found['setting'])}", versions=found.get("versions", {}))


def compare(out: Path) -> None:
    """Print a table of what is kept; end with one line of JSON."""
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*-*.json"))}
    pieces = {name: piece for name, piece in files.items() if name.startswith(("leyden-", "trl-"))}
    done = {name: piece for name, piece in pieces.items() if "failed" not in piece}
    for name, piece in pieces.items():
        words = ("step_s", "s_per_1000_tokens", "first_step_s", "compile_s")
        print(f"{name:24} {piece.get('failed') or ', '.join(f'{word} {piece[word]}' for word in words)}")
    trl = {name: piece for name, piece in done.items() if name.startswith("trl-")}
    corrected = {name: piece for name, piece in trl.items() if piece["setting"]["correction"]}
    if "leyden-torch" not in done or not corrected:
        raise SystemExit(f"{out} needs leyden-torch.json and a trl-*.json: run the parts `leyden` and `trl` first")
    seconds = {name: piece["s_per_1000_tokens"] for name, piece in done.items()}
    leyden, best = done["leyden-torch"], min(corrected, key=seconds.__getitem__)
    if any(piece[name] != leyden[name] for piece in done.values() for name in ASKED):
        raise SystemExit(f"{out} has results of different sizes ({', '.join(ASKED)}): delete those of the other size")
    result = {"ratio": round(seconds[best] / seconds["leyden-torch"], 2)}
    if uncorrected := [seconds[name] for name in trl if name not in corrected]:
        result["ratio_uncorrected"] = round(min(uncorrected) / seconds["leyden-torch"], 2)
    if "leyden-vllm" in done:
        result["ratio_of_leyden_with_vllm"] = round(seconds[best] / seconds["leyden-vllm"], 2)
    about = {name: leyden["measured"][name] for name in ("date", "machine")}
    versions = {**trl[best]["measured"]["versions"], **leyden["measured"]["versions"]}
    shown = {
        name: {key: piece[key] for key in piece if key not in (*ASKED, "measured")} for name, piece in done.items()
    }
    result |= {"leyden": shown.pop("leyden-torch"), "trl": shown[best], "others": shown}
    result |= {name: leyden[name] for name in ASKED}
    report_result(result, out, versions=versions, **about)


def main() -> None:
    """Measure what is asked for, print a table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("all", "leyden", "trl", "table"), nargs="?", default="all")
    parser.add_argument("--model", help="a folder")
    parser.add_argument("--questions", type=Path, help="JSON lines with `question`")
    parser.add_argument("--peer", default=sys.executable, help="a Python with TRL and vLLM")
    parser.add_argument("--tasks", type=int, default=32, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="at most, of each completion")
    parser.add_argument("--warmup", type=int, default=2, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=4, help="steps that do")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="of Leyden")
    parser.add_argument("--set", type=json.loads, default={}, metavar="JSON", help="sections of Leyden's configuration")
    parser.add_argument("--settings", type=read_setting, nargs="+", default=[read_setting(text) for text in SETTINGS])
    parser.add_argument("--limit-s", type=float, default=3600.0, help="of TRL's settings together")
    parser.add_argument("--cpu", action="store_true", help="both sides on the CPU, to try the script")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="of the results")
    options = parser.parse_args()
    if options.part == "table":
        compare(options.out)
        return
    if options.model is None or options.questions is None:
        parser.error("--model and --questions are needed")
    lines = options.questions.read_text(encoding="utf-8").splitlines()
    needed = options.tasks * (options.warmup + options.steps)
    plan: dict[str, Any] = {
        **{name: getattr(options, name) for name in (*ASKED, "warmup", "steps", "model")},
        "cuda": not options.cpu,
        "threads": 1,
        "learning_rate": LEARNING_RATE,
        "sections": {**options.set, "engine": {"kind": options.engine, **options.set.get("engine", {})}},
        "prompts": [
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": json.loads(line)["question"]}]
            for line in lines[:needed]
        ],
    }
    if options.part in ("all", "leyden"):
        with tempfile.TemporaryDirectory() as folder:
            ours = measure_leyden(plan, Path(folder))
        result = {**summarise(ours), "parts_s": ours["parts_s"], **{name: plan[name] for name in ASKED}}
        report_result(result, options.out, f"leyden-{options.engine}", versions=ours["versions"])
    if options.part in ("all", "trl"):
        measure_trl(plan, options.settings, options)
    if options.part == "all":
        compare(options.out)


if __name__ == "__main__":
    main()
