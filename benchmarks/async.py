"""Training while agents go on: agents whose durations have a heavy tail, at `training.max_staleness` 0 and 1.

    python benchmarks/async.py --out results/async_tail

Each agent asks the bundled model, works for as long as the name of its rollout says (log-normal: of 32 rollouts the
slowest takes about eight times as long as the median, as with compilers, browsers and tests), and asks again. Both runs
make the same rollouts. `ratio` is rollouts per second at limit 1 over limit 0. `discarded` are rollouts that finished
and that no step accounts for; `masked` is the share of sampled tokens that were too old. `slow_sampled` and
`slow_trained` are the shares that the slowest tenth of the rollouts has of the sampled and of the trained tokens.
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reporting import add_out, report_result

import leyden
from leyden.episodes import Episode
from leyden.local.train import TrainingResult
from leyden.orchestrator.report.metrics_log import read_metrics
from leyden.store.database import Database
from leyden.store.read import queries

AGENT = f"{Path(__file__).with_name('async_agent.py')}:ask_and_wait"
TASKS, GROUP = 8, 4


def train(limit: int, steps: int, median_s: float, spread: float, home: str) -> dict[str, Any]:
    """Train a run at a limit of staleness; return its figures."""
    tasks = [{"question": f"Say {number}.", "median_s": median_s, "spread": spread} for number in range(64)]
    result = leyden.train(
        run=f"limit-{limit}",
        agent=AGENT,
        tasks=tasks,
        held_out=0,
        model="spark",
        home=home,
        training={"steps": steps, "tasks_per_step": TASKS, "group_size": GROUP, "max_staleness": limit},
        sampling={"max_tokens": 4},
        workers={"processes": 1, "concurrency": 4 * TASKS * GROUP},
        checkpoints={"every": steps},
    )
    lines = read_metrics(result.folder / "metrics.jsonl", result.policy)
    episodes, trained = read_record(result, steps * TASKS)
    seconds = lines[-1]["time"] - min(one.rollout.created for one in episodes)
    sampled = sum(line["tokens/sampled"] for line in lines)
    slow = slowest_tenth(episodes)
    return {
        "rollouts_per_s": len(episodes) / seconds,
        "seconds": seconds,
        "rollouts": len(episodes),
        "discarded": len(episodes) - sum(line["rollouts/requested"] for line in lines),
        "masked": sum(line["tokens/stale"] for line in lines) / sampled,
        "staleness_mean": sum(line["staleness/mean"] * line["tokens/sampled"] for line in lines) / sampled,
        "staleness_max": max(line["staleness/max"] for line in lines),
        "slow_sampled": sum(map(tokens, slow)) / sum(map(tokens, episodes)),
        "slow_trained": sum(trained[one.attempt.id] for one in slow) / sum(trained.values()),
    }


def read_record(result: TrainingResult, groups: int) -> tuple[list[Episode], dict[str, int]]:
    """Return all rollouts of a run, and by attempt how many of its tokens were trained on."""
    database = Database(str(result.folder / "leyden.db"), readonly=True)
    try:
        with database.reader.begin() as connection:
            names = [f"train-{position}" for position in range(groups)]
            episodes = [one for name in names for one in queries.group_episodes(connection, result.run, name)]
            steps = {
                one.attempt.id: queries.rollout_credits(connection, result.run, one.rollout.id) for one in episodes
            }
            return episodes, {
                id: sum(call.tokens for step in found for call in step.calls) for id, found in steps.items()
            }
    finally:
        database.close()


def tokens(episode: Episode) -> int:
    """Return how many tokens a rollout sampled."""
    return sum(len(call.completion_ids) for call in episode.calls)


def slowest_tenth(episodes: list[Episode]) -> list[Episode]:
    """Return the rollouts whose agents worked longest."""
    by_time = sorted(episodes, key=lambda one: (one.attempt.ended or 0.0) - one.attempt.started)
    return by_time[-(len(by_time) // 10) :]


def main() -> None:
    """Train at both limits and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--median-s", type=float, default=0.8)
    parser.add_argument("--spread", type=float, default=1.0, help="deviation of the logarithm of durations")
    parser.add_argument("--limits", type=int, nargs="+", default=[0, 1])
    add_out(parser)
    given = parser.parse_args()
    found = {}
    with TemporaryDirectory() as home:
        for limit in given.limits:
            found[limit] = train(limit, given.steps, given.median_s, given.spread, home)
            print({name: round(value, 3) for name, value in found[limit].items()}, flush=True)
    rates = [found[limit]["rollouts_per_s"] for limit in given.limits]
    last = found[given.limits[-1]]
    result = {
        "ratio": round(rates[-1] / rates[0], 2),
        **{name: round(last[name], 4) for name in ("discarded", "masked", "slow_sampled", "slow_trained")},
        "limits": {str(limit): {k: round(v, 3) for k, v in figures.items()} for limit, figures in found.items()},
    }
    report_result(result, given.out)


if __name__ == "__main__":
    main()
