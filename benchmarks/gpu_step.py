"""Whole GRPO steps of a LangGraph SQL agent with a real model, and where their time goes.

The agent is examples/sql: a writer, a checker and a rewriter, of which writer and rewriter are trained, over rows of
Spider. A run is everything that `leyden train` is: server, durable store, agents in worker processes, gateway, engine,
trainer, publishing of weights. Each engine has a run in its own process.

    python examples/sql/prepare.py --data SPIDER TASKS
    python benchmarks/gpu_step.py --model MODEL --data TASKS --engine both --replay --out results/gpu_step

The first step of a run warms up and does not count where there are more. Figures are medians over the steps that
count. `sampled_tokens_per_s` is over the sampling phase, agents included; `trained_tokens_per_s` counts the sampled
tokens that were trained on, `computed_tokens_per_s` every distinct token that went through the model for it, and
`matmul_share` is what these amount to of the GPU's measured matrix-product rate (attention not counted).
`memory_gib` is the most that all processes had on the GPU. With `--replay`, `ratio` is our sampled tokens per second
over vLLM's alone, on the calls of the run's last step (gpu_step_replay.py).

Several adapters over one base: `--set 'training.lora={rank=16}' --set
'policies={writer={roles=["writer","checker"]},rewriter={roles=["rewriter"]}}'`, beside a run with the first alone.

To try it on a CPU: `--model spark --engine torch --tasks 2 --group 4 --reward noise`. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

from gpu_step_replay import Call, replay, vllm_server
from gpu_step_train import CONFIG
from reporting import add_out, report_result

from leyden.api.wire import RolloutPage
from leyden.config import read_file
from leyden.episodes import Episode
from leyden.models.source import find_model
from leyden.orchestrator.json_lines import read_lines
from leyden.records import Purpose
from leyden.store.database import Database
from leyden.store.read import queries

HERE = Path(__file__).parent
ENGINES = ("vllm", "torch")
PACKAGES = ("torch", "transformers", "vllm", "langgraph", "langchain-openai", "openai")
PHASES = SAMPLING, TRAINING, PUBLISHING = "time/sampling_s", "time/training_s", "time/publishing_s"
"""One after another they make a step; other times in the metrics are parts of these."""
ADDED = (TRAINING, PUBLISHING, "tokens/sampled", "tokens/trained", "tokens/computed")
"""What the policies of a run have apart."""
SPARE_S = 90.0
"""After its time limit a run may take so long to finish its step."""
Metrics = dict[str, Any]


class GpuMemory:
    """The most memory in use on the first GPU, by all processes; None where there is no GPU."""

    def __init__(self) -> None:
        self.peak_gib: float | None = None
        self._ended = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look twice a second."""
        if shutil.which("nvidia-smi") is None:
            yield
            return
        thread = threading.Thread(target=self._look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _look(self) -> None:
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while not self._ended.wait(0.5):
            used = subprocess.run(words, capture_output=True, text=True).stdout.strip()
            if used.isdigit():
                self.peak_gib = max(self.peak_gib or 0.0, int(used) / 1024)


def settings(options: argparse.Namespace, engine: str, home: Path) -> list[str]:
    """Return what a run has on top of the example's configuration."""
    rollouts = options.tasks * options.group
    chosen: dict[str, Any] = {
        "run": engine,
        "engine.kind": engine,
        "engine.slots": rollouts,
        "home": home,
        "model": options.model,
        "tasks": (options.data / "train.jsonl").resolve(),
        "held_out": 0,
        "training.steps": options.steps,
        "training.tasks_per_step": options.tasks,
        "training.group_size": options.group,
        "training.updates_per_step": 1,
        "training.schedule": "constant",
        "checkpoints.every": options.steps,
        "checkpoints.optimiser": "false",  # to write 14 GB more takes longer than two steps
        "workers.processes": options.processes,
        "workers.concurrency": rollouts,
    }
    if options.reward == "noise":
        chosen["reward"] = f"{HERE / 'gpu_step_reward.py'}:noise"
    return [*(f"{key}={value}" for key, value in chosen.items()), *options.set]


def train(words: Sequence[str], folder: Path, limit_s: float) -> tuple[float | None, Metrics]:
    """Train in its own process; return the GPU memory, and what the process prints about the device.

    At the time limit the run finishes its step, or is killed: the steps that are done count.
    """
    device = folder / "device.json"
    memory = GpuMemory()
    with memory.watched(), (folder / "train.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_step_train.py"), str(device), *words],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"the limit of {limit_s:.0f} s is reached: finishing the step", flush=True)
            process.send_signal(signal.SIGINT)
            try:
                process.wait(SPARE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode:
        print(f"the run ended with status {process.returncode}: see {folder / 'train.log'}", flush=True)
    return memory.peak_gib, json.loads(device.read_text()) if device.exists() else {}


def step_episodes(run: Path, name: str, step: int) -> list[Episode]:
    """Return all rollouts of a step, including those that replaced dropped groups."""
    database = Database(run / "leyden.db", readonly=True)
    try:
        with database.reader.begin() as look:
            listed = queries.list_rollouts(look, name, RolloutPage(limit=1_000_000))
            groups = dict.fromkeys(each.group for each in listed if each.purpose is Purpose.TRAIN and each.step == step)
            return [episode for group in groups for episode in queries.group_episodes(look, name, group)]
    finally:
        database.close()


def model_sizes(model: str) -> tuple[int, int]:
    """Parameters without the embeddings, and those of the output layer."""
    body, head = 0, 0
    for path in find_model(model, ".").folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        for name, tensor in header.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                head = prod(tensor["shape"])
            elif name != "__metadata__":
                body += prod(tensor["shape"])
    return body, head


def step_rows(lines: Iterable[Metrics]) -> list[Metrics]:
    """Return the metrics of each step. Several policies share its sampling; what each adds to it is added up."""
    rows: dict[int, Metrics] = {}
    for line in lines:
        if (row := rows.get(line["step"])) is not None:
            row |= {name: row.get(name, 0.0) + line.get(name, 0.0) for name in ADDED}
        elif line["step"]:
            rows[line["step"]] = dict(line)
    return list(rows.values())


def report(
    options: argparse.Namespace, rows: Sequence[Metrics], episodes: Sequence[Episode], memory: float | None, device: Any
) -> Metrics:
    """Return the figures of one engine. What was not measured is None."""
    counted = rows[1:] if len(rows) > 1 else rows
    whole = [sum(row.get(phase, 0.0) for phase in PHASES) for row in counted]
    split = sorted({name for row in counted for name in row if name.startswith("time/")})
    calls = [call for episode in episodes for call in episode.calls]
    prompts = [len(episode.prompt_ids(call)) for episode in episodes for call in episode.calls]
    return {
        "steps": len(rows),
        "step_s": _median(whole),
        "split_s": {name.removeprefix("time/"): _median([row.get(name) for row in counted]) for name in split},
        "sampled_tokens_per_s": _rate(counted, "tokens/sampled", SAMPLING),
        "trained_tokens_per_s": _rate(counted, "tokens/trained", TRAINING),
        "computed_tokens_per_s": _rate(counted, "tokens/computed", TRAINING),
        "matmul_share": _matmul_share(options.model, counted, device.get("matmul_tflops")),
        "timeouts": int(sum(row.get("rollouts/timeout", 0) for row in rows)),
        "publish_s": _median([row.get(PUBLISHING) for row in counted]),
        "memory_gib": memory,
        "trainer_peak_gib": device.get("trainer_peak_gib"),
        "matmul_tflops": device.get("matmul_tflops"),
        "reward": _median([row.get("reward/mean") for row in counted]),
        "flat_groups": int(sum(row.get("groups/flat", 0) for row in rows)),
        "calls_per_rollout": len(calls) / len(episodes) if episodes else None,
        "prompt_tokens_per_call": statistics.fmean(prompts) if prompts else None,
        "completion_tokens_per_call": statistics.fmean(len(call.completion_ids) for call in calls) if calls else None,
    }


def _median(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _rate(rows: Sequence[Metrics], tokens: str, seconds: str) -> float | None:
    return _median([row[tokens] / row[seconds] for row in rows if row.get(tokens) and row.get(seconds)])


def _matmul_share(model: str, rows: Sequence[Metrics], tflops: float | None) -> float | None:
    """Forward and backward of the layers for every distinct token, and of the output layer for each trained one."""
    if tflops is None:
        return None
    body, head = model_sizes(model)
    done = [
        6 * (body * row["tokens/computed"] + head * row["tokens/trained"]) / row[TRAINING]
        for row in rows
        if row.get("tokens/computed")
    ]
    return statistics.median(done) / (tflops * 1e12) if done else None


async def replayed(options: argparse.Namespace, rollouts: Sequence[Sequence[Call]], log: Path) -> float:
    """Tokens per second that vLLM alone samples for these calls."""
    model = str(find_model(options.model, ".").folder)
    async with vllm_server(options.vllm_python, model, log, options.vllm_argument) as session:
        seconds = await replay(session, rollouts, options.tasks * options.group)
    return sum(call.completion_tokens for calls in rollouts for call in calls) / seconds


def measure(options: argparse.Namespace, engine: str, home: Path) -> Metrics | None:
    """Run one engine, keep its results and return its figures; None where no step was done."""
    folder = home / f"{engine}-measured"
    folder.mkdir(parents=True, exist_ok=True)
    words = settings(options, engine, home)
    memory, device = train(words, folder, options.limit_s)
    run = home / engine
    rows = step_rows(read_lines(run / "metrics.jsonl"))
    if not rows:
        print((folder / "train.log").read_text(errors="replace")[-3000:], flush=True)
        print(f"{engine}: no step was done", flush=True)
        return None
    episodes = step_episodes(run, engine, int(rows[-1]["step"]))
    figures = report(options, rows, episodes, memory, device)
    if options.replay:
        chains = [
            [Call(episode.prompt_ids(call), len(call.completion_ids)) for call in episode.calls if call.completion_ids]
            for episode in episodes
        ]
        alone = asyncio.run(replayed(options, [calls for calls in chains if calls], folder / "vllm-replay.log"))
        ours = rows[-1]["tokens/sampled"] / rows[-1][SAMPLING]
        figures |= {"vllm_alone_tokens_per_s": alone, "ratio": ours / alone}
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / "metrics.jsonl", options.out / f"metrics-{engine}.jsonl")
        shutil.copy(run / "config.toml", options.out / f"config-{engine}.toml")
    return {name: _rounded(value) for name, value in figures.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def print_table(engine: str, figures: Metrics) -> None:
    """Print one engine's figures."""
    print(f"\n{engine}")
    for name, value in figures.items():
        if isinstance(value, dict):
            for part, seconds in value.items():
                print(f"  {f'{name} {part}':32}{seconds}")
        else:
            print(f"  {name:32}{'-' if value is None else value}")


def main() -> None:
    """Measure, print tables, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder, or spark")
    parser.add_argument("--data", type=Path, required=True, help="a folder that examples/sql/prepare.py made")
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument("--tasks", type=int, default=32, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="rollouts of a task")
    parser.add_argument("--steps", type=int, default=4, help="of each engine's run, the first included")
    parser.add_argument("--processes", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)), help="of agents")
    parser.add_argument("--reward", choices=("match", "noise"), default="match")
    parser.add_argument("--limit-s", type=float, default=540.0, help="for each engine's run")
    parser.add_argument("--replay", action="store_true", help="send the last step's calls to vLLM alone")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration")
    parser.add_argument("--vllm-python", default=sys.executable, help="the interpreter that has vLLM, for --replay")
    parser.add_argument("--vllm-argument", action="append", default=[], help="of the server that replays")
    parser.add_argument("--home", type=Path, default=Path("runs/gpu_step"), help="the folder of the runs")
    add_out(parser)
    options = parser.parse_args()
    began = time.monotonic()
    result: Metrics = dict.fromkeys(ENGINES)
    for engine in ENGINES if options.engine == "both" else (options.engine,):
        print(f"{engine}: {options.steps} steps of {options.tasks} x {options.group} rollouts", flush=True)
        if (figures := measure(options, engine, options.home.resolve())) is not None:
            result[engine] = figures
            print_table(engine, figures)
    ratios = {engine: figures.get("ratio") for engine, figures in result.items() if figures}
    result |= {"ratio": ratios.get("vllm", ratios.get("torch")), "model": Path(options.model).name}
    result |= {"tasks": options.tasks, "group": options.group, "rollout_limit_s": rollout_limit()}
    result |= {"processes": options.processes, "reward": options.reward, "seconds": round(time.monotonic() - began, 1)}
    report_result(result, options.out, versions=versions())


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter and are installed."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def rollout_limit() -> float:
    """Return the time limit of the example's configuration."""
    return float(read_file(CONFIG)["rollout"]["time_limit_s"])


if __name__ == "__main__":
    main()
