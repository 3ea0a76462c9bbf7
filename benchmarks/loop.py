"""Seconds of a whole GRPO step (sample, score, update) beside TRL's GRPOTrainer, and where they go.

The bundled model in float32 on the CPU; the same prompts in the same order, the same group, completions of exactly the
same length, one AdamW update a step, no KL. Leyden is everything that `leyden train` is: a server with a durable store,
a worker process in which an agent asks with the `openai` client through the gateway, the embedded engine, the trainer.
TRL generates and scores in one process (peer_trl.py says how it is set up), in its own virtual environment
(.bench/trl), with the number of threads and of micro-batches that is the fastest in a trial before, and with
`torch_compile` if that is faster still; Leyden is as it comes, and compiles nothing on a CPU. Lengths are equal because
no token ends a completion, on both sides; rewards are random on both sides, so that every completion is trained on. The
two take turns, in fresh runs whose first steps do not count.

    python benchmarks/loop.py

The last line is one JSON object; `ratio` is the median of TRL's steps over the median of Leyden's;
`ratio_of_fastest`, of the fastest step of each, is what a machine that is not quiet disturbs least; `first_step_s` of
each is the first step of its first run, in which TRL compiles if it does. Leyden's checkpoints (by default one in ten
steps; TRL makes none here) are written while steps go on, and have a line of their own.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import peer_trl as peer
import uvloop
from checkouts import Run, add_against, alternate_runs, commits, compare_medians
from loop_config import configuration
from msgspec.structs import replace
from peers import install
from reporting import add_out, report_result

from leyden.process.resources import configure_openmp

configure_openmp()  # before torch is imported, as `leyden train` does

from leyden.config import Config, read_config
from leyden.engine.protocol import EngineRequest, TokenChunk
from leyden.engine.torch.engine import TorchEngine
from leyden.episodes import Episode
from leyden.learner.checkpoint import Checkpoints
from leyden.learner.loading import load_model
from leyden.learner.local import LocalLearner, TrainedPolicy
from leyden.learner.objective import objective_of
from leyden.learner.policy import Policy
from leyden.learner.protocol import TrainerState, UpdateMetrics
from leyden.learner.snapshot import Snapshot
from leyden.local.policies import LocalPolicy
from leyden.local.stack import LocalStack, local_stack
from leyden.models.source import find_model
from leyden.orchestrator.algorithm.resolve import algorithm_of
from leyden.orchestrator.loop import Trainer
from leyden.orchestrator.pipeline import RunParts, build_pipeline
from leyden.orchestrator.report.metrics_log import MetricsLog
from leyden.orchestrator.report.step_report import StepReport
from leyden.orchestrator.rollouts.evaluation import EvaluationResult
from leyden.orchestrator.rollouts.tasks import Tasks
from leyden.records import Task

HERE = Path(__file__).parent
QUESTIONS = HERE.parent / "examples" / "calc_plain" / "tasks.jsonl"
SYSTEM = "Use the calculator, then answer after ####."
PARTS = ("sampling", "agents, gateway, store", "gradient", "optimiser", "scoring, publishing", "journal")
ASKED = ("tasks", "group", "tokens")
CORES = os.cpu_count() or 1
SETTINGS = [{"threads": threads, "micro_batches": parts} for threads in sorted({1, CORES}) for parts in (1, 2, 4)]
"""Of TRL: on a machine that others use, too, more threads than one take many times as long."""
COMPILED = {"compile": "whole"}
LEARNING_RATE = 1e-6


class Clock:
    """Watches a trainer: what the parts of each step took."""

    def __init__(self, engine: TorchEngine, rollouts: int, tokens: int) -> None:
        self._engine, self._rollouts, self._tokens = engine, rollouts, tokens
        self._began = time.perf_counter()
        self._sampled = self._busy = 0.0
        self._spent: dict[str, float] = {}
        self.checkpoints: list[float] = []
        self.steps: list[dict[str, float]] = []

    def spend(self, part: str, seconds: float) -> None:
        """Add the seconds of a part of the current step."""
        self._spent[part] = self._spent.get(part, 0.0) + seconds

    def progress(self, step: int, done: int, asked: int, what: str) -> None:
        """When the last rollout is in, so is all that the engine did for this step."""
        if done == asked:
            self.spend("sampling", self._engine.stats.busy_s - self._busy)

    def step(self, report: StepReport, left_s: float) -> None:
        """Close the current step."""
        trained = sum(metrics.tokens for metrics in report.metrics)
        assert report.sampled == trained == self._rollouts * self._tokens, "completions differ in length, or are left"
        now, spent = time.perf_counter(), self._spent
        spent["agents, gateway, store"] = report.sampling_s - spent["sampling"]
        updated_s = report.training_s + report.publishing_s
        spent["scoring, publishing"] = updated_s - spent["gradient"] - spent["optimiser"]
        spent["journal"] = now - self._began - report.sampling_s - updated_s
        self.steps.append({"step": now - self._began, **spent})
        self._began, self._busy, self._spent = now, self._engine.stats.busy_s, {}

    def measured(self, step: int, measured: EvaluationResult, episodes: Sequence[Episode]) -> None:
        """Nothing is held out."""

    def tested(self, step: int, measured: EvaluationResult) -> None:
        """There are no test tasks."""

    def warn(self, message: str) -> None:
        """Do nothing: a few steps cannot collapse."""


class TimedPolicy(Policy):
    """A policy that says how long it takes."""

    clock: Clock

    def accumulate(self, *args: Any) -> UpdateMetrics:
        """Forward and backward."""
        began = time.perf_counter()
        metrics = super().accumulate(*args)
        self.clock.spend("gradient", time.perf_counter() - began)
        return metrics

    def apply(self, grad_norm: float) -> None:
        """Clipping and AdamW."""
        began = time.perf_counter()
        super().apply(grad_norm)
        self.clock.spend("optimiser", time.perf_counter() - began)


class TimedCheckpoints(Checkpoints):
    """Checkpoints that say how long they take."""

    clock: Clock

    def write(self, snapshot: Snapshot) -> Path:
        """Write one, while training goes on."""
        began = time.perf_counter()
        path = super().write(snapshot)
        self.clock.checkpoints.append(time.perf_counter() - began)
        return path


def ignore_stop_tokens(engine: TorchEngine) -> None:
    """Make an engine sample until a completion's length is reached, whatever it samples."""
    generate = engine.generate

    def endless(request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        return generate(replace(request, stop_ids=()))

    engine.generate = endless


async def measure_leyden(plan: dict[str, Any], tasks: Tasks, folder: Path) -> dict[str, Any]:
    """Train as `leyden train` does, with a clock among the observers; return the times of its parts."""
    config = read_config(configuration(plan, QUESTIONS))
    source = find_model(config.model, config.base)
    model = load_model(source, config.engine.dtype, config.training)
    policy = TimedPolicy(model, config.training)
    checkpoints = TimedCheckpoints(folder, config.policy, source, config.checkpoints)
    trained = TrainedPolicy(policy, objective_of(config), checkpoints)
    async with local_stack(config, folder, [LocalPolicy(config, source, model)], config.run) as stack:
        ignore_stop_tokens(stack.engines[config.policy])
        clock = Clock(stack.engines[config.policy], plan["tasks"] * plan["group"], plan["tokens"])
        policy.clock = checkpoints.clock = clock
        metrics = MetricsLog(folder / "metrics.jsonl", config.policy, 0, stack.remote, config.run, ())
        with LocalLearner({config.policy: trained}) as learner:
            name, states = config.policy, {config.policy: TrainerState()}
            parts = RunParts(stack.remote, stack.engines, learner, (metrics, clock))
            pipeline = build_pipeline(config, {name: algorithm_of(config)}, tasks, parts, states, folder)
            await stack.run(Trainer(config, pipeline, states).run(asyncio.Event()))
        await metrics.close()
        prompt_tokens = await count_prompts(stack, config)
    return {
        "first_step_s": clock.steps[0]["step"],
        "steps": clock.steps[plan["warmup"] :],
        "checkpoint_s": clock.checkpoints,
        "prompt_tokens": prompt_tokens,
    }


async def count_prompts(stack: LocalStack, config: Config) -> int:
    """Tokens of all the prompts of the last step."""
    steps, size = config.training.steps, config.training.tasks_per_step
    names = [f"train-{position}" for position in range((steps - 1) * size, steps * size)]
    groups = [await stack.remote.group_episodes(config.run, name) for name in names]
    return sum(len(call.prompt_ids) for group in groups for episode in group for call in episode.calls)


def best_settings(plan: dict[str, Any]) -> dict[str, Any]:
    """Those with which TRL takes the least time, by a few steps with each."""
    best = min(SETTINGS, key=lambda settings: trial(plan, settings))
    return min(best, {**best, **COMPILED}, key=lambda settings: trial(plan, settings))


def trial(plan: dict[str, Any], settings: dict[str, Any]) -> float:
    """Return the seconds of TRL's fastest step with some settings."""
    with tempfile.TemporaryDirectory() as folder:
        took = min(measure_trl({**plan, "trl": settings, "warmup": 2, "steps": 4}, Path(folder))["step_s"])
    print(f"trial: trl {took:.3f} s with {settings}", flush=True)
    return took


def measure_trl(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Measure the same of TRL, and install it where it is missing."""
    settings = {**plan["trl"]}
    asked = {**plan, "threads": settings.pop("threads"), "settings": [settings]}
    (found,) = peer.run(install("trl", peer.INSTALL) / "python", asked, folder)
    return found


def read_questions(needed: int) -> Tasks:
    """Return this many questions, each as the messages that both sides send."""
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in random.Random(0).sample(lines, min(needed, len(lines)))]
    asked = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["question"]}] for row in rows]
    tasks = (Task(row["id"], {"messages": messages}) for row, messages in zip(rows, asked, strict=True))
    return Tasks(tuple(tasks), (), seed=0)


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the middle, and how far it spreads."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    spread = [round(low, 4), round(high, 4)]
    return {
        "median_s": round(middle, 4),
        "quartiles_s": spread,
        "fastest_s": round(min(seconds), 4),
        "steps": len(seconds),
    }


def summarise(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], plan: dict[str, Any]) -> dict[str, Any]:
    """Print a table; all of it as one object."""
    steps = [step for one in ours for step in one["steps"]]
    leyden = summary([step["step"] for step in steps])
    trl = summary([seconds for one in theirs for seconds in one["step_s"]])
    rounds = [
        statistics.median(other["step_s"]) / statistics.median(step["step"] for step in one["steps"])
        for one, other in zip(ours, theirs, strict=True)
    ]
    parts = {part: statistics.fmean(step[part] for step in steps) for part in PARTS}
    checkpoint = statistics.fmean(seconds for one in ours for seconds in one["checkpoint_s"])
    generating, scoring = (
        statistics.fmean(seconds for one in theirs for seconds in one[name]) for name in ("generating_s", "scoring_s")
    )
    rest = statistics.fmean(seconds for one in theirs for seconds in one["step_s"]) - generating - scoring
    trl_parts = {"sampling": generating, "scoring": scoring, "gradient, optimiser": rest}
    for name, result, shares in (("leyden", leyden, parts), ("trl", trl, trl_parts)):
        low, high = result["quartiles_s"]
        fastest = f"the fastest {result['fastest_s']:.3f}"
        print(f"\n{name:24}{result['median_s']:8.3f} s a step, half of them {low:.3f} to {high:.3f}, {fastest}")
        for part, seconds in shares.items():
            print(f"  {part:22}{seconds:8.3f} s {seconds / sum(shares.values()):6.0%}")
    print(f"\na checkpoint of Leyden  {checkpoint:8.3f} s, while steps go on")
    ratio = trl["median_s"] / leyden["median_s"]
    fastest_ratio = trl["fastest_s"] / leyden["fastest_s"]
    by_round = ", ".join(f"{one:.2f}" for one in rounds)
    print(f"TRL's median over Leyden's: {ratio:.2f}; by round: {by_round}; of the fastest steps: {fastest_ratio:.2f}\n")
    return {
        "ratio": round(ratio, 2),
        "ratio_by_round": [round(one, 2) for one in rounds],
        "ratio_of_fastest": round(fastest_ratio, 2),
        "leyden": {
            **leyden,
            "first_step_s": round(ours[0]["first_step_s"], 4),
            "parts_s": _rounded(parts),
            "checkpoint_s": round(checkpoint, 4),
        },
        "trl": {**trl, "first_step_s": round(theirs[0]["warmup_s"][0], 4), "parts_s": _rounded(trl_parts)},
        **{name: plan[name] for name in (*ASKED, "learning_rate")},
        "trl_settings": plan["trl"],
        "prompt_tokens_last_step": ours[-1]["prompt_tokens"],
        "cores": CORES,
    }


def _rounded(parts: dict[str, float]) -> dict[str, float]:
    return {part: round(seconds, 4) for part, seconds in parts.items()}


ALONE = """
import json, sys, tempfile
from pathlib import Path
import loop, uvloop
plan = json.loads(sys.argv[1])
tasks = loop.read_questions((plan["warmup"] + plan["steps"]) * plan["tasks"])
with tempfile.TemporaryDirectory() as folder:
    print(json.dumps(uvloop.run(loop.measure_leyden(plan, tasks, Path(folder)))))
"""


def compare(plan: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Compare two checkouts: steps, and the CPU time of all processes of a run."""
    pairs = alternate_runs(options, "-c", ALONE, json.dumps(plan))

    def steps(run: Run) -> list[float]:
        return [step["step"] for step in run.result["steps"]]

    return {
        "median_step_s": compare_medians(
            [(statistics.median(steps(mine)), statistics.median(steps(theirs))) for mine, theirs in pairs]
        ),
        "fastest_step_s": compare_medians([(min(steps(mine)), min(steps(theirs))) for mine, theirs in pairs]),
        "cpu_s_of_a_run": compare_medians([(mine.cpu_s, theirs.cpu_s) for mine, theirs in pairs]),
        **{name: plan[name] for name in (*ASKED, "warmup", "steps")},
    }


def main() -> None:
    """Measure, print a table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=8, help="prompts of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of each completion")
    parser.add_argument("--warmup", type=int, default=3, help="steps of a round that do not count")
    parser.add_argument("--steps", type=int, default=12, help="steps of a round that do")
    add_against(parser)
    add_out(parser)
    options = parser.parse_args()
    questions = (options.warmup + options.steps) * options.tasks
    tasks = read_questions(questions)
    plan = {
        **{name: getattr(options, name) for name in (*ASKED, "warmup", "steps")},
        "learning_rate": LEARNING_RATE,
        "model": str(find_model("spark", ".").folder),
        "prompts": [tasks.at(position).input["messages"] for position in range(questions)],
    }
    if options.against:
        alone = {name: plan[name] for name in plan if name != "prompts"}
        result = compare(alone, options)
        report_result(result, options.out, "against", checkouts=commits(options))
        return
    plan["trl"] = best_settings(plan)
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for number in range(1, options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            ours.append(uvloop.run(measure_leyden(plan, tasks, Path(folder))))
            theirs.append(measure_trl(plan, Path(folder)))
        if ours[-1]["prompt_tokens"] != theirs[-1]["prompt_tokens"][-1]:
            raise SystemExit(f"prompts differ: {ours[-1]['prompt_tokens']} tokens, {theirs[-1]['prompt_tokens'][-1]}")
        mine, other = (
            statistics.median(seconds)
            for seconds in ([step["step"] for step in ours[-1]["steps"]], theirs[-1]["step_s"])
        )
        print(f"round {number}: leyden {mine:.3f} s, trl {other:.3f} s", flush=True)
    result = summarise(ours, theirs, plan)
    report_result(result, options.out)


if __name__ == "__main__":
    main()
