"""Whether an agent with a tight time limit learns to be brief.

The bundled model is asked for a few words on a subject, one call a rollout. An answer that comes within the time limit
is worth 1, whatever it says; a rollout that runs out of time gets the failure reward, 0. So the only thing to learn is
to end in time, and almost all that can teach it are calls that were cut inside.

Time on shared cores is unsteady, so the engine is paced: a request gets its next token `--pace` seconds after the one
before, as from a larger model. spark samples several times faster than that for all rollouts of a step at once, so the
limit is one of tokens, `limit / pace`, less what the agent itself takes. Everything else is as in any training: a real
clock, a real worker that times the agent out, a gateway that cuts the call.

    python benchmarks/brief.py --out results/brief

The last line is one JSON object; `ratio` is the share of time-outs on tasks held out, before training over after it,
where none counts as one. `length` is the mean number of tokens of answers to those tasks without any limit.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from reporting import add_out, report_result
from transformers import AutoModelForCausalLM

import leyden.local.engine
from leyden.config import read_config
from leyden.engine.protocol import EngineRequest, TokenChunk
from leyden.engine.torch.engine import TorchEngine
from leyden.local.train import TrainingResult, train
from leyden.models.source import find_model
from leyden.orchestrator.report.metrics_log import read_metrics
from leyden.records import Sampling
from leyden.rendering.factory import renderer_for
from leyden.rendering.tokenizer import Tokenizer

_LISTED = (
    "the sea, dogs, music, the moon, bread, trains, winter, gardens, Rome, chess, coffee, rivers, glass, owls, summer, "
    "bridges, paper, salt, islands, clocks, horses, rain, cities, apples, painting, snow, maps, bees, tea, forests, "
    "windmills, cats, gold, letters, mountains, ships, stars, cheese, rabbits, lamps, castles, football, the wind, "
    "kites, markets, honey, libraries, deserts"
)
SUBJECTS = _LISTED.split(", ")
HELD_OUT = 16
MAX_LENGTH = 200
"""Of an answer without a limit of time."""


class PacedEngine(TorchEngine):
    """Gives a request its next token `pace_s` after the one before, at the earliest."""

    pace_s = 0.0

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a completion, one token a chunk."""
        due = time.monotonic()
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                last = len(chunk.ids) - 1
                for at, (token, logprob) in enumerate(zip(chunk.ids, chunk.logprobs, strict=True)):
                    due = max(due + self.pace_s, time.monotonic())
                    await asyncio.sleep(due - time.monotonic())
                    yield TokenChunk((token,), (logprob,), chunk.version, finish=chunk.finish if at == last else None)


def train_brief(folder: Path, *, steps: int, limit_s: float, pace_s: float, seed: int = 0) -> TrainingResult:
    """Train in a folder, with a paced engine."""
    tasks = [{"question": f"Tell me about {subject}."} for subject in SUBJECTS]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks[HELD_OUT:]))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks[:HELD_OUT]))
    PacedEngine.pace_s = pace_s
    leyden.local.engine.TorchEngine = PacedEngine  # what `running_engine` starts
    config = read_config(
        {
            "run": "brief",
            "agent": str(Path(__file__).with_name("brief_agent.py")) + ":solve",
            "tasks": str(folder / "tasks.jsonl"),
            "held_out": str(folder / "held_out.jsonl"),
            "model": "spark",
            "seed": seed,
            "home": str(folder / "runs"),
            "rollout": {"time_limit_s": limit_s, "failure_reward": 0.0},
            "training": {
                "steps": steps,
                "tasks_per_step": 4,
                "group_size": 8,
                "learning_rate": 2e-4,
                "schedule": "constant",
            },
            "evaluation": {"every": 0, "rollouts": 2},
            "workers": {"concurrency": 32},
        }
    )
    return asyncio.run(train(config))


def lengths(model: Path, samples: int = 8) -> float:
    """Sample answers to the tasks held out, without a limit of time; return their mean length in tokens."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.load(model)
    renderer = renderer_for(tokenizer)
    engine = TorchEngine(AutoModelForCausalLM.from_pretrained(model).eval(), slots=32)
    stop_ids = tuple(renderer.get_stop_token_ids())

    async def sample(subject: str, seed: int) -> int:
        messages = [{"role": "user", "content": f"Tell me about {subject}."}]
        prompt = tuple(renderer.render_ids(messages, add_generation_prompt=True))
        request = EngineRequest(prompt, Sampling(seed=seed), stop_ids, MAX_LENGTH, session=subject)
        return sum([len(chunk.ids) async for chunk in engine.generate(request)])

    async def sample_all() -> list[int]:
        return await asyncio.gather(*(sample(s, seed) for s in SUBJECTS[:HELD_OUT] for seed in range(samples)))

    try:
        return fmean(asyncio.run(sample_all()))
    finally:
        engine.close()


def summarise(trained: TrainingResult) -> dict[str, Any]:
    """Time-outs and lengths, before training, step by step, and after it."""
    assert trained.checkpoint is not None
    lines = read_metrics(trained.folder / "metrics.jsonl", trained.policy)
    measured = [line for line in lines if "held_out/reward" in line]
    timeouts = [round(line.get("held_out/timeout", 0) / (2 * HELD_OUT), 3) for line in (measured[0], measured[-1])]
    steps = [line for line in lines if line["step"] > 0]
    length = [round(lengths(model), 1) for model in (find_model("spark", ".").folder, trained.checkpoint)]
    return {
        "ratio": round(timeouts[0] / max(timeouts[1], 1 / (2 * HELD_OUT)), 2),
        "timeouts_held_out": timeouts,
        "length": length,
        "timeouts_by_step": [round(line.get("rollouts/timeout", 0) / line["rollouts/requested"], 3) for line in steps],
        "tokens_by_step": [round(line["tokens/sampled"] / line["rollouts/requested"], 1) for line in steps],
        "excluded_by_step": [
            int(sum(v for k, v in line.items() if k.startswith("rollouts/excluded"))) for line in steps
        ],
    }


def main() -> None:
    """Train once and print what was learnt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--limit", type=float, default=7.2, help="time limit of a rollout in seconds")
    parser.add_argument("--pace", type=float, default=0.2, help="seconds between two tokens of a request")
    parser.add_argument("--seed", type=int, default=0)
    add_out(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trained = train_brief(
            Path(folder), steps=options.steps, limit_s=options.limit, pace_s=options.pace, seed=options.seed
        )
        result = {**summarise(trained), "steps": options.steps, "limit_s": options.limit, "pace_s": options.pace}
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(trained.folder / "metrics.jsonl", options.out / "metrics.jsonl")
    report_result(result, options.out)


if __name__ == "__main__":
    main()
