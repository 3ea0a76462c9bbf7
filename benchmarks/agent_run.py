"""Trains the agent of an example on a real model and says what the agent does differently afterwards.

    python benchmarks/agent_run.py examples/calc/calc.toml model=FOLDER training.time_limit_s=700 --out results/calc

Trains, then evaluates the last weights with the tool taken away (`--alone`). With `--score` another function of task
and result is applied to the same rollouts. The folder of `--out` gets `summary.json`, `rollouts.md` (the same three
held-out tasks before and after, as conversations), metrics, configuration and curve. The last line is the summary, all
of held-out rollouts; `ratio` is the reward after training over that before.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reporting import add_out, report_result

import leyden
from leyden.config import override, read_file
from leyden.episodes import Episode
from leyden.orchestrator.report.metrics_log import read_metrics
from leyden.store.database import Database
from leyden.store.read import queries
from leyden.user_code.loading import load_callable, placeholder_keys

SHOWN = 3
"""Tasks whose rollouts are written out."""
ESTIMATES = ("before", "after", "change", "before_error", "after_error", "change_error")
PHASES = ("sampling", "training", "publishing", "evaluation")


def read_episodes(folder: Path, run: str, groups: Sequence[str]) -> list[Episode]:
    """Return the rollouts of some groups of a run."""
    database = Database(str(folder / "leyden.db"), readonly=True)
    try:
        with database.reader.begin() as connection:
            return [one for group in groups for one in queries.group_episodes(connection, run, group)]
    finally:
        database.close()


def share_with_tools(episodes: Sequence[Episode]) -> float:
    """Return the share of rollouts that call a tool at all."""
    called = [any((call.response or {}).get("tool_calls") for call in episode.calls) for episode in episodes]
    return round(fmean(called), 3)


def score(episodes: Sequence[Episode], function: Callable[..., float]) -> float:
    """Return the mean of a function of task and result; 0 for a rollout without a result."""
    scored = (function(one.task.input, one.attempt.result) if one.attempt.result else 0.0 for one in episodes)
    return round(fmean(scored), 4)


def time_of_a_step(metrics: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the mean seconds of the phases of a step, the first one left out: layers are compiled in it."""
    steps = [row for row in metrics if row["step"] > 1]
    return {phase: round(fmean(row.get(f"time/{phase}_s", 0.0) for row in steps), 2) for phase in PHASES}


def conversations(episodes: dict[str, list[Episode]]) -> Iterator[str]:
    """Yield the first rollouts of each evaluation as Markdown."""
    for when, found in episodes.items():
        for episode in found[:SHOWN]:
            yield f"## {when}: {episode.task.id}, reward {episode.final_reward(0.0)}\n"
            last = episode.calls[-1:]
            for message in (one for call in last for one in (*episode.messages(call), call.response or {})):
                calls = [json.dumps(one, ensure_ascii=False) for one in message.get("tool_calls") or ()]
                text = "\n".join([str(message.get("content") or ""), *calls]).strip()
                yield f"**{message.get('role', 'assistant')}**\n\n```\n{text}\n```\n"


def main() -> None:
    """Train, evaluate, summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="override a setting of the configuration")
    parser.add_argument("--alone", default="agent.py:solve_alone", help="the agent without its tool")
    parser.add_argument("--score", help="another function of task and result, as in reward.py:answer_f1")
    add_out(parser)
    options = parser.parse_args()
    document = override(read_file(options.config), options.settings)
    trained = leyden.train(**document)
    other = {"agent": options.alone, "model": str(trained.checkpoint), "tasks": document["held_out"]}
    alone = leyden.evaluate(**{**document, **other})
    with (Path(document["base"]) / document["held_out"]).open(encoding="utf-8") as file:
        ids = [json.loads(line)["id"] for line in file]
    before, after = (
        read_episodes(trained.folder, trained.run, [f"eval-{step}-{id}" for id in ids]) for step in (0, trained.step)
    )
    without = read_episodes(alone.folder, alone.run, [f"eval-{id}" for id in ids])
    metrics = read_metrics(trained.folder / "metrics.jsonl", trained.policy)

    def measured(name: str) -> dict[str, float]:
        values = {
            row["step"]: round(row[f"held_out/calls/{name}"], 3) for row in metrics if f"held_out/calls/{name}" in row
        }
        return {"before": values[0], "after": values[trained.step]}

    summary: dict[str, Any] = {
        "ratio": round(trained.after / trained.before, 3) if trained.after and trained.before else None,
        **{key: getattr(trained, key) for key in ESTIMATES},
        "tool_calls": measured("tool_calls_per_rollout"),
        "calls": measured("per_rollout"),
        "rollouts_with_tool_calls": {"before": share_with_tools(before), "after": share_with_tools(after)},
        "without_tool": alone.reward,
        "without_tool_error": alone.error,
        "rows": len(ids),
        "steps": trained.step,
        "seconds": round(trained.seconds),
        "step_s": time_of_a_step(metrics),
        "seed": document.get("seed", 0),
    }
    if options.score:
        with placeholder_keys():
            function = load_callable(options.score, document["base"])
        scored = {"before": before, "after": after, "without_tool": without}
        summary[options.score.partition(":")[2]] = {when: score(found, function) for when, found in scored.items()}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "config.toml", "curve.png"):
            shutil.copyfile(trained.folder / name, options.out / name)
        shown = {"before": before, "after": after, "after, without the tool": without}
        (options.out / "rollouts.md").write_text("\n".join(conversations(shown)), encoding="utf-8")
    report_result(summary, options.out, "summary")


if __name__ == "__main__":
    main()
